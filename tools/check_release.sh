#!/usr/bin/env bash
# Builds wheel and sdist, installs each into an empty environment, and trains there. Leaves both in dist/.
#   PYTHON=python3.12 tools/check_release.sh
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
# As an environment variable the constraints hold for the isolated builds too.
export PIP_CONSTRAINT="$root/constraints.txt" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1

step() { printf '\n== %s (after %d s)\n' "$*" "$SECONDS"; }

step "wheel and sdist, the wheel built from the sdist"
rm -rf "$root/dist"
"$python" -m venv "$work/build"
"$work/build/bin/pip" install build
"$work/build/bin/python" -m build --outdir "$root/dist" "$root"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml")

step "metadata"
# twine has its own versions of what constraints.txt pins
PIP_CONSTRAINT='' "$work/build/bin/pip" install twine
"$work/build/bin/twine" check --strict "$root"/dist/*

for file in "$root/dist/phasetrain-$version-py3-none-any.whl" "$root/dist/phasetrain-$version.tar.gz"; do
    step "$(basename "$file") in an empty environment"
    rm -rf "$work/environment" "$work/folder"
    "$python" -m venv "$work/environment"
    mkdir "$work/folder"
    "$work/environment/bin/pip" install "$file"
    cd "$work/folder"
    printed=$("$work/environment/bin/phasetrain" --version)
    [ "$printed" = "phasetrain $version" ] || { echo "--version: '$printed'" >&2; exit 1; }
    "$work/environment/bin/phasetrain" PHASES.updates=30 RUN.dir=run
    "$work/environment/bin/phasetrain" resume run PHASES.updates=40 RUN.allow=PHASES
    cd "$root"
done

step "all passed"
