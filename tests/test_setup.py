"""What `make setup` asks of a GPU machine, with a stand-in for nvidia-smi."""

import os
import shutil
import subprocess
import sys

from helpers import ROOT, parametrize

SMI = "#!/bin/sh\necho '| NVIDIA-SMI 580.65   Driver Version: 580.65   CUDA {}     |'\n"
PYTHON = f"""#!/bin/sh
case "$2" in
    *sysconfig*) exit 0 ;;  # Python.h is there
    venv) echo "ENOUGH" >&2; exit 9 ;;  # all checks have passed: the environment would be made now
    *) exec {sys.executable} "$@" ;;
esac
"""


@parametrize("cuda, compiler, said", [
    ("Version: 12.4", "gcc", "the NVIDIA driver supports CUDA 12, these builds of torch and vLLM need CUDA 13"),
    ("Version: 13.0", None, "no C compiler, and Triton needs one"),
    ("UMD Version: 14.2", "clang", "ENOUGH"),  # as of driver 610
    (None, None, "ENOUGH"),  # no GPU: nothing of it is needed
])  # fmt: skip
def test_a_gpu_machine_without_driver_or_compiler_is_told_so_in_one_sentence(tmp_path, cuda, compiler, said):
    programs = {"python": PYTHON, compiler: "#!/bin/sh\n", "nvidia-smi": cuda and SMI.format(cuda)}
    for name, text in programs.items():
        if name and text:
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
    for name in ("sh", "uname", "sed"):
        (tmp_path / name).symlink_to(shutil.which(name))
    result = subprocess.run(["sh", ROOT / "setup.sh", "python"], cwd=tmp_path, env=os.environ | {"PATH": str(tmp_path)},
                            capture_output=True, text=True, check=False)  # fmt: skip
    (sentence,) = result.stderr.splitlines()
    assert said in sentence
    assert result.returncode == (9 if said == "ENOUGH" else 1)
