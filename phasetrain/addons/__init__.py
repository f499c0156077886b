"""Add-ons of phasetrain. The core imports none of them, and none imports another one."""
