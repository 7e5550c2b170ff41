"""Python runs this at the start of each child process of a test that has no marker `engine`."""

import sys


def refuse_vllm(event: str, arguments: tuple) -> None:
    if event == "import" and arguments[0] == "vllm":
        sys.exit("this test starts an engine: mark it @pytest.mark.engine")


sys.addaudithook(refuse_vllm)
