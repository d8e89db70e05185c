"""A warm process behaves as a new one: streams, arguments, environment, exit status, signals."""

import signal
import subprocess
import sys
import time

import pytest

from support.warm_python import start_warm

pytestmark = pytest.mark.slow


def test_code_and_scripts_have_their_arguments_environment_folder_and_streams(tmp_path):
    show = "import os, sys; print(__name__, sys.argv[1:], os.environ['WARM'], os.getcwd(), 'torch' in sys.modules)"
    (tmp_path / "script.py").write_text(show + "\nprint('worse', file=sys.stderr)")
    for code in (show, tmp_path / "script.py"):
        process = start_warm(code, "a b", env={"WARM": "yes"}, cwd=tmp_path)
        out, err = process.communicate()
        assert out == f"__main__ ['a b'] yes {tmp_path} True\n"
        assert err == ("" if code is show else "worse\n")


@pytest.mark.parametrize(
    "code", ["pass", "raise SystemExit(3)", "1 / 0", "import os; os._exit(9)", "import os; os.abort()"]
)
def test_the_exit_status_is_that_of_a_new_process(code):
    process = start_warm(code)
    process.communicate()
    assert process.returncode == subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode


def test_signals_reach_it_and_its_exit_functions_run(tmp_path):
    code = "import atexit, time; atexit.register(print, 'over'); open('ready', 'w').close(); time.sleep(60)"
    process = start_warm(code, cwd=tmp_path)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert out == "over\n"
    assert err.endswith("KeyboardInterrupt\n")
    assert process.returncode == -signal.SIGINT
