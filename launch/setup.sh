#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes .venv in this checkout: the exact packages of launch/constraints.txt, and this package in editable form.
# demo.sh and test.sh call it; when .venv is up to date it returns at once.
#
#   PYTHON   the interpreter to build .venv with (default: the first of python3, python3.13 .. python3.10 in range)

set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
stamp=$venv/.complete
pins=$root/launch/constraints.txt

say() { printf 'setup: %s\n' "$*" >&2; }

# "3.11" for an interpreter in range, nothing for any other (or for none at all, as behind a pyenv shim).
version_of() {
    "$1" -c 'import sys; v = sys.version_info[:2]; print("%d.%d" % v) if (3, 10) <= v < (3, 14) else None' 2>/dev/null || true
}

find_python() {
    local candidates=(python3 python3.13 python3.12 python3.11 python3.10) candidate
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if [ -n "$(version_of "$candidate")" ]; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "no Python 3.10 to 3.13 among ${candidates[*]}: install one, or name one in PYTHON"
    return 1
}

wanted() { cat -- "$root/pyproject.toml" "$pins" | sha256sum | cut -d ' ' -f 1; }

# "<what wanted printed> <Python version>" of the last complete set-up; nothing if there is none that still runs, or if
# the checkout was moved since: a virtual environment points back to where it was made.
have() {
    local made place
    if "$venv/bin/python" -c '' 2>/dev/null && { read -r made && IFS= read -r place; } 2>/dev/null <"$stamp"; then
        if [ "$place" = "$root" ]; then printf '%s\n' "$made"; fi
    fi
}

# Whether $1, a line from have, was made with the interpreter asked for.
right_python() { [ -z "${PYTHON:-}" ] || [ "${1#* }" = "$(version_of "$PYTHON")" ]; }

up_to_date() {
    local made
    made=$(have)
    [ "${made% *}" = "$(wanted)" ] && right_python "$made"
}

pip() { PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0 "$venv/bin/python" -m pip "$@" >&2; }

build() {
    local made python
    made=$(have)
    if [ -n "$made" ] && right_python "$made"; then
        say "1/4 .venv (Python ${made#* }) is there; its packages are brought up to date"
        rm -f -- "$stamp"
    else
        # Without a stamp nobody knows what is in there, and pip does not notice files that are missing.
        python=$(find_python)
        made="- $(version_of "$python")"
        say "1/4 a new .venv (Python ${made#* })"
        rm -rf -- "$venv"
        "$python" -m venv "$venv"
    fi
    say "2/4 packages; the first time about 3.4 GB to download, 7 GB on disk"
    # The list is complete, so pip has nothing to resolve. It leaves out aisimulate, a requirement of ai-dynamo that only
    # NVIDIA's own index has and that nothing here imports.
    pip install --no-deps -r "$pins"
    say "3/4 this package"
    pip install --no-deps --no-build-isolation -e "$root"
    say "4/4 a first import"
    "$venv/bin/python" -c 'import dynamo.common.backend, nixl, torch, torchvision, transformers, dynamo_epd'
    printf '%s %s\n%s\n' "$(wanted)" "${made#* }" "$root" >"$stamp"
    say "done"
}

if up_to_date; then exit; fi
exec 9>"$root/.venv.lock"
if ! flock -n 9; then
    say "another set-up of this checkout is running; waiting for it"
    flock 9
fi
up_to_date || build
