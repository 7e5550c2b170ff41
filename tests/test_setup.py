"""What `make setup` asks of a GPU machine, with a stand-in for nvidia-smi."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

SMI = "| NVIDIA-SMI 580.65   Driver Version: 580.65   CUDA {}     |"
PYTHON = """#!/bin/sh
case "$2" in
    *sysconfig*) exec {python} -c "import sys, sysconfig as s; s.get_path = lambda *_: '.'; exec(sys.argv[1])" "$2" ;;
    venv) echo "ENOUGH" >&2; exit 9 ;;  # all checks have passed: the environment would be made now
    *) exec {python} "$@" ;;
esac
"""


def write(path: Path, text: str = "#!/bin/sh\n") -> None:
    path.write_text(text)
    path.chmod(0o755)
    if not os.access(path, os.X_OK):
        pytest.skip("the folder for temporary files is mounted noexec")


@pytest.mark.parametrize("cuda, compiler, headers, said", [
    ("Version: 12.4", "gcc", True, "the NVIDIA driver supports CUDA 12, these builds of torch and vLLM need CUDA 13"),
    ("UMD Version: 12.9", "gcc", True, "the NVIDIA driver supports CUDA 12"),  # as of driver 610
    ("Version: 13.0", None, True, "no C compiler, and Triton needs one"),
    ("Version: 13.0", "gcc", False, "no Python.h, and Triton needs it"),
    ("UMD Version: 14.2", "clang", True, "ENOUGH"), (None, None, False, "ENOUGH"),  # no GPU: nothing of it is needed
])  # fmt: skip
def test_a_gpu_machine_without_driver_compiler_or_headers_is_told_so_in_one_sentence(
    tmp_path, cuda, compiler, headers, said
):
    for name in ("sh", "uname", "sed"):
        (tmp_path / name).symlink_to(shutil.which(name))
    write(tmp_path / "python", PYTHON.format(python=sys.executable))
    if headers:
        write(tmp_path / "Python.h")
    if compiler:
        write(tmp_path / compiler)
    if cuda:
        write(tmp_path / "nvidia-smi", f"#!/bin/sh\necho '{SMI.format(cuda)}'\n")
    result = subprocess.run(["sh", ROOT / "setup.sh", "python"], cwd=tmp_path, env=os.environ | {"PATH": str(tmp_path)},
                            capture_output=True, text=True, check=False)  # fmt: skip
    (sentence,) = result.stderr.splitlines()
    assert said in sentence
    assert result.returncode == (9 if said == "ENOUGH" else 1)
    assert not (tmp_path / ".venv").exists()


