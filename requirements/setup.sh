#!/usr/bin/env bash
# Fill .venv with what `make demo` (argument: demo) or `make test` (argument: test) needs. Run by the Makefile.
set -euo pipefail
cd "$(dirname "$0")/.."
level=$1
sglang=$(sed -n 's/^sglang==//p' requirements/demo.txt)
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '\n== %s\n' "$*"; }
die() { printf '\nset-up: %s\n' "$*" >&2; exit 1; }

has_sglang() {
    "$1" -c "import importlib.metadata as m, importlib.util as u, sys; sys.exit(m.version('sglang') != '$sglang' or not u.find_spec('torch'))" 2>/dev/null
}

# The first Python that carries the pinned SGLang (the active one is asked first), else the first that is new enough.
base_python() {
    local name new_enough=()
    for name in python python3 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            new_enough+=("$name")
        fi
    done
    for name in "${new_enough[@]}"; do
        if has_sglang "$name"; then
            echo "$name"
            return
        fi
    done
    if [ ${#new_enough[@]} -gt 0 ]; then
        echo "${new_enough[0]}"
        return
    fi
    die "no Python >= 3.11 on PATH; SGLang $sglang needs one. Debian, Ubuntu: apt install python3 python3-venv"
}

# pip leaves a package half written when it is interrupted and takes it for installed the next time.
if [ -e .venv/.unfinished ]; then
    say "the last set-up was interrupted: starting .venv anew (downloads are cached)"
    rm -rf .venv
fi

# The tests need what the demo needs, and that went with the old .venv.
if [ "$level" = test ] && ! [ -e .venv/.ready-demo ]; then
    requirements/setup.sh demo
fi

if ! [ -x .venv/bin/python ]; then
    base=$(base_python)
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$base cannot create a virtual environment (no ensurepip). Debian, Ubuntu: apt install python3-venv"
    say "creating .venv with $("$base" -V)"
    mkdir -p .venv && touch .venv/.unfinished
    "$base" -m venv .venv
    if has_sglang "$base"; then
        say "SGLang $sglang of $("$base" -c 'import sys; print(sys.prefix)') is used as it is; nothing is installed there"
        # A venv made from a venv would see the system's packages, not the parent's: name the folders.
        "$base" -c 'import site
for folder in site.getsitepackages() + [site.getusersitepackages()] * bool(site.ENABLE_USER_SITE):
    print(f"import site; site.addsitedir({folder!r})")' > "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_parent.pth"
    fi
fi

touch .venv/.unfinished
# Some machines configure locations that they lack, and pip says so dozens of times; its progress bar is on stdout.
pip() {
    { .venv/bin/python -m pip "$@" 2>&1 >&3 | sed -u "/^WARNING: Location '.*' is ignored: /d" >&2; } 3>&1
}
if [ "$level" = demo ]; then
    has_sglang .venv/bin/python || say "installing SGLang $sglang and PyTorch: some gigabytes, several minutes"
    pip install -r requirements/demo.txt
    pip install --no-deps -r requirements/demo-nodeps.txt
    pip install --no-deps --no-build-isolation -e .
else
    say "installing the tools and oracles of the tests"
    pip install -r requirements/test.txt
    pip install --no-deps -r requirements/test-nodeps.txt
fi
.venv/bin/python requirements/check.py "$level"
rm .venv/.unfinished
touch ".venv/.ready-$level"
