"""A real Slurm on loopback: munged, mariadbd, slurmdbd, slurmctld and two slurmd, all in one folder and on free ports.

    with real_slurm(folder) as environment:      # {"SLURM_CONF": ...}
        subprocess.run(["sinfo"], env={**os.environ, **environment})

Each is a child of ours in the foreground, so it is ended by its process and never by name.
"""

import os
import shutil
import signal
import socket
import stat
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from testbeds.wait_until import wait_until

TEMPLATES = Path(__file__).parent / "slurm"
NEEDED = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "sbatch")
GPUS = ("/dev/fakegpu0", "/dev/fakegpu1")


def need_slurm():
    """Skips without Slurm; fails where it was promised to be there."""
    missing = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing or os.geteuid() != 0:
        message = f"no Slurm here (missing: {missing or 'root'}); tests/servers/install brings it"
        if os.environ.get("FLOPWATCH_REQUIRE_SERVERS") == "1":
            pytest.fail(message)
        pytest.skip(message)


@contextmanager
def real_slurm(folder, node_timeout_seconds=30):
    """Yields the environment in which sbatch and its like talk to it; `folder` is not below one only root may enter."""
    ports = free_ports(5)
    fields = {
        "folder": folder,
        "host": socket.gethostname().partition(".")[0],
        "controller_port": ports[0],
        "accounting_port": ports[1],
        "database_port": ports[2],
        "node_ports": f"{ports[3]},{ports[4]}",
        "node_timeout_seconds": node_timeout_seconds,
    }
    prepare(folder, fields)
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    everything = {**os.environ, **environment, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    with ExitStack() as started:
        started.callback(kill_jobs, environment["SLURM_CONF"])

        def run(name, *command):
            started.enter_context(daemon(folder / f"{name}.out", command, everything))

        def ask(*command):
            return subprocess.run(command, env=everything, capture_output=True, text=True, timeout=30)

        run("munged", "munged", "--foreground", *munge_paths(folder))
        wait_until(lambda: (folder / "munge.socket").exists(), "munged answers")
        run("mariadbd", "mariadbd", *database_options(folder, fields["database_port"]))
        make_database(ask, folder)
        run("slurmdbd", "slurmdbd", "-D")
        wait_until(lambda: ask("sacctmgr", "-n", "list", "cluster").returncode == 0, "slurmdbd answers")
        assert ask("sacctmgr", "-i", "add", "cluster", "flopwatch").returncode == 0
        run("slurmctld", "slurmctld", "-D", "-f", environment["SLURM_CONF"])
        for node in ("n1", "n2"):
            run(f"slurmd-{node}", "slurmd", "-D", "-N", node, "-f", environment["SLURM_CONF"])
        wait_until(lambda: set(ask("sinfo", "-h", "-N", "-o", "%T").stdout.split()) == {"idle"}, "both nodes are idle")
        yield environment


def free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def prepare(folder, fields):
    """Configuration, a munge key of its own, and character devices that stand for GPUs."""
    folder.chmod(0o755)
    for name in ("state", "spool/n1", "spool/n2"):
        (folder / name).mkdir(parents=True)
    fields["accounting"] = (TEMPLATES / "accounting.conf").read_text().format(**fields)
    for template in ("slurm.conf", "slurmdbd.conf", "gres.conf", "cgroup.conf"):
        (folder / template).touch(mode=0o600)
        (folder / template).write_text((TEMPLATES / template).read_text().format_map(fields))
    (folder / "munge.key").touch(mode=0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))
    for gpu in GPUS:
        if not os.path.exists(gpu):
            os.mknod(gpu, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # reads as /dev/null


def munge_paths(folder):
    # As root it would refuse the group-writable parents some machines have for /tmp, hence --force.
    return [
        *("--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"),
        *(f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"),
    ]


def database_options(folder, port):
    data = folder / "database"
    data.mkdir()
    shutil.chown(data, "mysql")
    make = ["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={data}", "--skip-test-db"]
    subprocess.run([*make, "--auth-root-authentication-method=normal"], check=True, capture_output=True)
    return [
        *("--no-defaults", "--user=mysql", f"--datadir={data}", f"--socket={data}/sock", f"--pid-file={data}/pid"),
        *("--bind-address=127.0.0.1", f"--port={port}", "--innodb-lock-wait-timeout=900"),
        *("--innodb-flush-log-at-trx-commit=0", "--innodb-log-file-size=16M"),
    ]


def make_database(ask, folder):
    client = ("mariadb", "--no-defaults", f"--socket={folder}/database/sock", "-uroot", "-e")
    wait_until(lambda: ask(*client, "select 1").returncode == 0, "mariadbd answers")
    user = "slurm@'127.0.0.1'"
    sql = (
        f"create database slurm_acct_db; create user {user} identified by 'only-on-loopback'; "
        f"grant all on slurm_acct_db.* to {user};"
    )
    assert ask(*client, sql).returncode == 0


@contextmanager
def daemon(log, command, environment):
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def kill_jobs(slurm_conf):
    """What jobs left: slurmstepd goes its own way, and knows which Slurm it belongs to."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("SLURM_CONF") == slurm_conf:
                process.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue
