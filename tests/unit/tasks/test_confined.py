"""What a task's code can't read, fill up, kill or leave behind: with namespaces, and where the kernel gives none."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.protocol.errors import TaskFailed
from app.protocol.task_spec import TaskLimits, TaskSpec
from app.tasks import keeper, landlock, worker_process
from app.tasks.registry import load_task
from app.tasks.sandbox import SandboxTask, reached

SOURCE = """
import concurrent.futures, ctypes, errno, mmap, multiprocessing, os, signal, socket, subprocess, time
from app.tasks.base import Prompt

def kernel(name):
    libc = ctypes.CDLL(None, use_errno=True)
    answers = {
        "unshare": lambda: libc.unshare(0x10000000),
        "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
        "trace": lambda: libc.ptrace(0, 0, None, None),
        "memfd": lambda: libc.memfd_create(b"x", 0),
        "segment": lambda: libc.shmget(0, 4096, 0o1600),
    }
    return f"{answers[name]()} {errno.errorcode.get(ctypes.get_errno())}"

class Bad:
    name, train_size, heldout_size = "bad", 1, 1

    def __init__(self, params, seed):
        self.params = params

    def train(self, index):
        return Prompt(index, "?", {})

    heldout = train

    def reward(self, prompt, text):
        what, _, path = text.partition(" ")
        if what == "read": return float(len(open(path, "rb").read()))
        if what == "write": open(path, "w").write("x")
        if what == "list": return float(len(os.listdir(path)))
        if what == "here": raise RuntimeError(os.getcwd())
        if what == "own":
            open("mine", "w").write("x")
            return float(len(os.listdir(".")))
        if what == "deep":
            for _ in range(3000):
                os.mkdir("d"); os.chdir("d")
            if path: time.sleep(60)
        if what == "family":
            for _ in range(6):
                if not os.fork():
                    held = bytearray(os.urandom(1)) * (60 << 20)
                    time.sleep(60)
            time.sleep(60)
        if what == "shared":
            held = [mmap.mmap(-1, 100 << 20) for _ in range(6)]
            for one in held:
                for place in range(0, len(one), 4096): one[place] = 1
            time.sleep(60)
        if what == "shm":
            multiprocessing.Lock()
            with open("/dev/shm/x", "wb") as file:
                for _ in range(100): file.write(bytes(1 << 20))
        if what == "kill": os.kill(os.getppid(), signal.SIGKILL)
        if what == "spy": return float(len(open(f"/proc/{os.getppid()}/environ").read()))
        if what == "kernel": raise RuntimeError(kernel(path))
        if what == "threads":
            with concurrent.futures.ThreadPoolExecutor(3) as pool: list(pool.map(time.sleep, [0.01] * 9))
            subprocess.run(["true"], check=True)
            ours, other = multiprocessing.Pipe()
            multiprocessing.get_context("fork").Process(target=other.send, args=(3.0,)).start()
            return ours.recv()
        if what == "talk": socket.socket(socket.AF_UNIX).connect(path)
        if what == "datagram": socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", int(path)))
        if what == "dial": socket.create_connection(("127.0.0.1", int(path)), 2)
        if what == "leave":
            if not os.fork():
                os.setsid()
                if not os.fork():
                    while True: os.utime(path); time.sleep(0.02)
                os._exit(0)
            time.sleep(60)
        return 1.0
"""
LIMITS = {"timeout_s": 20, "processes": 1, "memory_mb": 128}
BARE = "import app.tasks.confine as c; c._WAYS = (); "
"""As in a container that lets nobody make namespaces."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "source.py").write_text(SOURCE)
    return tmp_path / "task"


def opened(folder: Path, **limits: Any) -> SandboxTask:
    task = load_task(TaskSpec(name="x.py:Bad", limits={**LIMITS, **limits}), 0, folder)
    assert isinstance(task, SandboxTask)
    return task


@pytest.fixture(params=["namespaces", "bare"])
def task(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxTask]:
    if request.param == "bare":
        before, after = worker_process._PROGRAM.split("from app.tasks.child")
        monkeypatch.setattr(worker_process, "_PROGRAM", f"{before}{BARE}from app.tasks.child{after}")
    found = opened(folder)
    if request.param == "bare":
        assert not {"network", "processes", "proc", "shm"} & set(found.cut_off)
    yield found
    found.close()


def asked(task: SandboxTask, text: str) -> float:
    return task.reward(task.train(0), text)


def needs(task: SandboxTask, word: str) -> None:
    if word not in task.cut_off:
        pytest.skip(f"this kernel does not cut it off from {word}")


def test_the_users_files_are_out_of_reach(task: SandboxTask, tmp_path: Path):
    needs(task, "files")
    secret = tmp_path / "secret"
    secret.write_text("token")
    reads = (f"read {secret}", f"list {tmp_path}", f"list {Path(__file__).parents[3]}", "list /root")
    for text in (*reads, f"write {secret}", f"write {tmp_path}/new"):
        with pytest.raises(TaskFailed, match="Permission denied"):
            asked(task, text)
    assert secret.read_text() == "token"


@pytest.mark.parametrize("path", ["/etc/shadow", "/etc/gshadow", "/etc/ssl/private", "/etc/ssh", "/etc/sudoers"])
def test_what_is_secret_of_the_system_is_out_of_reach(task: SandboxTask, path: str):
    needs(task, "files")
    if not os.path.exists(path):
        pytest.skip(f"this machine has no {path}")
    with pytest.raises(TaskFailed, match="Permission denied"):
        asked(task, f"{'list' if os.path.isdir(path) else 'read'} {path}")


def test_what_programs_look_up_is_there(task: SandboxTask):
    for path in ("/etc/passwd", "/etc/hosts", "/etc/ld.so.cache"):
        if os.path.exists(path):
            assert asked(task, f"read {path}") > 0 or os.path.getsize(path) == 0


def test_its_own_folder_and_source_and_what_python_needs_are_there(task: SandboxTask, folder: Path):
    assert asked(task, "own") == 1
    assert asked(task, f"read {folder}/source.py") == len(SOURCE)
    assert asked(task, f"list {os.path.dirname(os.__file__)}") > 100
    assert asked(task, "read /dev/null") == 0
    if "files" in task.cut_off:
        with pytest.raises(TaskFailed, match="Permission denied"):
            asked(task, f"write {folder}/source.py")


def test_a_task_may_be_given_more_to_read(folder: Path, tmp_path: Path):
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "a").write_text("123")
    task = opened(folder, read=[str(rows)])
    assert asked(task, f"read {rows}/a") == 3
    if "files" in task.cut_off:
        with pytest.raises(TaskFailed, match="Permission denied"):
            asked(task, f"write {rows}/b")
    task.close()


@pytest.mark.parametrize("path", ["data", "", "../x", "/a\0b", "/" + "x" * 1000])
def test_only_absolute_paths_can_be_given(path: str):
    with pytest.raises(ValidationError):
        TaskLimits(read=[path])


def test_each_process_has_a_folder_of_its_own_which_is_gone_with_it(folder: Path):
    task = opened(folder, processes=2)
    seen = []
    for _ in range(2):
        with pytest.raises(TaskFailed, match="echo2-task-") as here:
            asked(task, "here")
        seen.append(here.value.detail.rpartition(" ")[2])
        process = task._pool._free.queue[-1]
        assert process is not None
        process.kill()
    assert len(set(seen)) == 2
    assert not any(map(os.path.exists, seen))
    task.close()


def test_a_folder_too_deep_to_be_followed_is_removed(task: SandboxTask):
    scratch = Path(task._pool._scratch.name)
    with contextlib.suppress(TaskFailed):
        # Its keeper may be quicker.
        asked(task, "deep")
    task.close()
    assert not scratch.exists()


def test_a_deep_folder_of_a_process_that_is_busy_is_removed(task: SandboxTask):
    scratch = Path(task._pool._scratch.name)

    def ask() -> None:
        with contextlib.suppress(TaskFailed):
            asked(task, "deep and on")

    asking = threading.Thread(target=ask)
    asking.start()
    until = time.monotonic() + 15
    while not list(scratch.glob("run-*/" + "d/" * 50)) and time.monotonic() < until:
        time.sleep(0.01)
    task.close()
    asking.join(15)
    assert not asking.is_alive()
    assert not scratch.exists()


@pytest.mark.parametrize("how", ["family", "shared"])
def test_all_that_it_holds_together_is_bounded(task: SandboxTask, how: str):
    with pytest.raises(TaskFailed, match="together use more than 2 times"):
        asked(task, how)
    assert asked(task, "ok") == 1.0


def test_shared_memory_is_small_or_out_of_reach(task: SandboxTask):
    if not {"shm", "files"} & set(task.cut_off):
        pytest.skip("this kernel can do neither")
    with pytest.raises(TaskFailed, match="No space left" if "shm" in task.cut_off else "Permission denied"):
        asked(task, "shm")
    assert not os.path.exists("/dev/shm/x")


def test_it_can_not_end_or_read_who_watches_it(task: SandboxTask):
    if not {"processes", "signals"} & set(task.cut_off):
        pytest.skip("this kernel can't keep it from that")
    for text in ("kill", "spy"):
        with pytest.raises(TaskFailed, match=r"Permission|No such|not permitted"):
            asked(task, text)
    assert asked(task, "ok") == 1.0


def test_it_is_cut_off_as_far_as_the_kernel_can(task: SandboxTask):
    known = landlock.version(ctypes.CDLL(None))
    wanted = {word for word, since in (("files", 1), ("tcp", 4), ("signals", 6)) if known >= since}
    if "Seccomp:" in Path("/proc/self/status").read_text() and os.uname().machine in ("x86_64", "aarch64"):
        wanted.add("calls")
    assert wanted <= set(task.cut_off)


def test_no_port_is_reached(task: SandboxTask):
    if not {"network", "tcp"} & set(task.cut_off):
        pytest.skip("this kernel can't keep it from that")
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TaskFailed, match=r"denied|unreach|refused"):
        asked(task, f"dial {server.getsockname()[1]}")


@pytest.mark.parametrize(
    ("name", "answer"),
    [("unshare", "EPERM"), ("mount", "EPERM"), ("trace", "EPERM"), ("memfd", "ENOSYS"), ("segment", "ENOSYS")],
)
def test_calls_that_no_task_needs_are_refused(task: SandboxTask, name: str, answer: str):
    needs(task, "calls")
    with pytest.raises(TaskFailed, match=f"-1 {answer}"):
        asked(task, f"kernel {name}")


def test_threads_and_programs_are_not(task: SandboxTask):
    assert asked(task, "threads") == 3


def test_no_socket_is_made_without_the_network(task: SandboxTask, tmp_path: Path, folder: Path):
    """Neither a datagram nor a service's socket in the file system, which the kernel's other means let through."""
    needs(task, "calls")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as heard, socket.socket(socket.AF_UNIX) as service:
        heard.bind(("127.0.0.1", 0))
        heard.settimeout(10)
        service.bind(str(tmp_path / "s"))
        service.listen()
        port = heard.getsockname()[1]
        for text in (f"datagram {port}", f"talk {tmp_path / 's'}"):
            with pytest.raises(TaskFailed, match="Permission denied"):
                asked(task, text)
        granted = opened(folder, network=True)
        assert asked(granted, f"datagram {port}") == 1
        assert heard.recv(10) == b"x"
        granted.close()


def test_who_left_its_session_and_lost_its_parent_ends_all_the_same(task: SandboxTask, tmp_path: Path):
    mark = tmp_path / "mark"
    mark.touch()
    began = mark.stat().st_mtime_ns

    def ask() -> None:
        with pytest.raises(TaskFailed):
            asked(task, f"leave {mark}")

    asking = threading.Thread(target=ask)
    asking.start()
    until = time.monotonic() + 15
    while mark.stat().st_mtime_ns == began and time.monotonic() < until:
        time.sleep(0.01)
    assert mark.stat().st_mtime_ns != began, "it never left"
    task.close()
    asking.join(15)
    last = mark.stat().st_mtime_ns
    time.sleep(0.3)
    assert mark.stat().st_mtime_ns == last


def test_who_fills_the_disk_is_ended(tmp_path: Path):
    code = textwrap.dedent("""
        import os, sys, time
        from app.tasks import confine, keeper
        keeper.MOST_FILES = 20
        os.chdir(sys.argv[1])
        confine.confine(1 << 30, folder=sys.argv[1])
        for number in range(30): open(f"{number}", "w").close()
        time.sleep(60)
    """)
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, stdin=subprocess.DEVNULL)
    assert ended.returncode == keeper.OVER_FOLDER
    assert worker_process.SAID[keeper.OVER_FOLDER].startswith("it has more than")


def test_bytes_and_files_of_a_folder_are_counted(tmp_path: Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_bytes(bytes(1 << 20))
    assert keeper.too_much(str(tmp_path), 1 << 19)
    assert not keeper.too_much(str(tmp_path), 1 << 22)
    assert not keeper.too_much(str(tmp_path / "gone"), 1)


def test_what_python_reads_is_no_whole_disk():
    found = landlock.python_folders()
    assert "/" not in found
    assert os.path.dirname(os.path.dirname(os.__file__)) in {*found, *(os.path.dirname(path) for path in found)}


def test_a_module_of_one_file_that_is_installed_in_place_can_be_read(monkeypatch: pytest.MonkeyPatch):
    finder = types.ModuleType("__editable___rows_finder")
    finder.MAPPING = {"rows": "/src/rows", "games": "/src/games"}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    assert {"/src/rows.py", "/src/games"} <= set(landlock.python_folders())


def test_a_kernel_without_landlock_restricts_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(landlock, "version", lambda libc: 0)
    assert landlock.restrict(ctypes.CDLL(None), {"/": 0}, network=False) == []


@pytest.mark.parametrize(
    ("cut_off", "network", "says"),
    [
        (["network", "processes", "proc", "shm", "files"], False, []),
        (["network", "processes", "proc", "shm"], False, ["the user's files"]),
        (["files", "tcp", "signals"], False, ["the network"]),
        (["files", "tcp", "signals"], True, []),
        (["files", "tcp", "signals", "calls"], False, []),
        (["files"], True, ["what other processes are"]),
        (
            [],
            False,
            ["the network", "what other processes are", "shared memory of others", "the user's files"],
        ),
    ],
)
def test_what_is_not_cut_off_is_told(cut_off: list[str], network: bool, says: list[str]):
    assert reached(cut_off, network=network) == says
