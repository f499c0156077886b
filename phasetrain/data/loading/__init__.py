"""Reading samples and forming batches, in the main process or in workers."""
