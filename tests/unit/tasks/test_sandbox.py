"""Code that is not ours can fail in every way it likes: the process that asks goes on, and no failure is a reward."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.protocol.errors import BadInput, TaskFailed
from app.protocol.task_spec import TaskSpec
from app.tasks.base import is_deterministic, is_multi_turn
from app.tasks.registry import load_task
from app.tasks.sandbox import SandboxTask

SOURCE = """
import ctypes, os, signal, socket, time
from app.protocol.errors import BadInput, FieldError
from app.tasks.base import Prompt, Reply

class Plain:
    name, train_size, heldout_size = "plain", 3, 2

    def __init__(self, params, seed):
        if params.get("load") == "hang":
            time.sleep(60)
        if params.get("load") == "raise":
            raise ValueError("no such level")
        if params.get("load") == "bad":
            raise BadInput("level is 1 to 3", errors=[FieldError("/task/params/level", "level is 1 to 3")])
        self.params, self.seed = params, seed

    def train(self, index):
        if not 0 <= index < 3:
            raise BadInput(f"there is no number {index}")
        return Prompt(index, f"question {index} of seed {self.seed}", {"object": object()})

    heldout = train

    def reward(self, prompt, text):
        print("noise that is no answer", flush=True)
        if text == "hang": time.sleep(60)
        if text == "spin":
            while True: pass
        if text == "memory": return float(len(bytearray(1 << 31)))
        if text == "exit": os._exit(3)
        if text == "leave": raise SystemExit(0)
        if text == "raise": raise RuntimeError("boo")
        if text == "nan": return float("nan")
        if text == "text": return "much"
        if text == "forge": os.write(4, b'{"id": 1, "reward": 1.0}\\n'); time.sleep(60)
        if text.startswith("{"): os.write(4, text.encode() + b"\\n"); time.sleep(60)
        if text.startswith("["): os.write(4, b"[" * 100_000 + b"\\n"); time.sleep(60)
        if text == "hash": return hash("one") % 1000003
        if text == "uncover": ctypes.CDLL(None).umount2(b"/proc", 2); return float(proc_seen())
        if text == "stay":
            # Whoever was told to die with its parent can say that it won't, and leave its parent's group.
            ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); os.setsid()
            while True: os.utime(self.params["mark"]); time.sleep(0.02)
        if text == "stay by killing": os.kill(0, signal.SIGSTOP)
        if text == "network": socket.create_connection(("127.0.0.1", self.params["port"]), 2)
        if text == "slow": time.sleep(0.5)
        if text == "environment": raise RuntimeError(" ".join(os.environ))
        if text == "descriptors": return float(max(int(n) for n in os.listdir("/proc/self/fd")))
        if text == "here": raise RuntimeError(os.getcwd())
        return prompt.index + len(text) / 10

def proc_seen():
    return sum(name.isdigit() for name in os.listdir("/proc"))

class Sized(Plain):
    def __init__(self, params, seed): self.train_size = int(params["size"])

class HalfACharacter(Plain):
    def train(self, index): return Prompt(index, chr(0xd800), {})

class Turns(Plain):
    deterministic = False

    def respond(self, prompt, turns):
        return None if len(turns) == 3 else Reply(f"so far {'/'.join(turns)}")

    def episode_reward(self, prompt, turns):
        return float(len(turns))

class Half:
    name = "half"
    def __init__(self, params, seed): pass

class Broken(Plain):
    def respond(self, prompt, turns): return None

NOT_CALLABLE = 3
"""
FAST = {"timeout_s": 1.5, "processes": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "source.py").write_text(SOURCE)
    return tmp_path


@pytest.fixture
def plain(folder: Path) -> Iterator[SandboxTask]:
    task = opened(folder)
    yield task
    task.close()


def opened(folder: Path, name: str = "x.py:Plain", seed: int = 7, limits: dict[str, Any] = FAST, **params: Any) -> Any:
    return load_task(TaskSpec(name=name, params=params, limits=limits), seed, folder)


def test_a_task_from_a_file_works_like_any_other(plain: SandboxTask):
    assert (plain.name, plain.train_size, plain.heldout_size) == ("plain", 3, 2)
    prompt = plain.train(2)
    assert (prompt.index, prompt.text) == (2, "question 2 of seed 7")
    assert plain.reward(prompt, "abc") == 2.3
    assert not is_multi_turn(plain)
    assert is_deterministic(plain)
    with pytest.raises(BadInput, match="there is no number 9"):
        plain.train(9)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("hang", "longer than 1.5 s"),
        ("spin", "longer than 1.5 s"),
        ("forge", "longer than 1.5 s|no answer"),
        ("memory", "memory"),
        ("exit", "exit status 3"),
        ("leave", "SystemExit"),
        ("raise", "boo"),
        ("nan", "not finite"),
        ("text", "ValueError"),
        ("[", "no answer"),
        ('{"id": 4, "reward": 1.0}', "no answer"),
    ],
)
def test_what_fails_is_an_error_and_the_next_reward_is_right(plain: SandboxTask, answer: str, says: str):
    prompt = plain.train(1)
    with pytest.raises(TaskFailed, match=says):
        plain.reward(prompt, answer)
    assert plain.reward(prompt, "ok") == 1.2


@pytest.mark.parametrize(
    ("forged", "says"),
    [
        ('{"id": 3, "reward": 1' + "0" * 400 + "}", "not a finite number"),
        ('{"id": 3, "reward": NaN}', "not a finite number"),
        ('{"id": 3, "reward": {}}', "not a finite number"),
        ('{"id": 3, "bad_input": "x", "errors": 5}', "^x$"),
        ('{"id": 3, "failed": {"a": 1}}', "{'a': 1}"),
    ],
)
def test_what_a_task_writes_past_us_is_an_error_of_ours(plain: SandboxTask, forged: str, says: str):
    """It answers its own question; then its process sleeps on."""
    prompt = plain.train(1)
    with pytest.raises((TaskFailed, BadInput), match=says):
        plain.reward(prompt, forged)


def test_it_sees_no_secret_no_descriptor_and_no_folder_of_ours(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECHO2_JOIN_TOKEN", "secret")
    with (folder / "source.py").open() as kept:
        os.set_inheritable(kept.fileno(), True)
        task = opened(folder)
        prompt = task.train(0)
        with pytest.raises(TaskFailed) as environment:
            task.reward(prompt, "environment")
        # 0 to 2, its two pipes, and the one that lists the folder.
        assert task.reward(prompt, "descriptors") == 5
    assert "ECHO2" not in environment.value.detail
    assert "PATH" in environment.value.detail
    with pytest.raises(TaskFailed, match="echo2-task-"):
        task.reward(prompt, "here")
    task.close()


def test_it_can_not_take_the_private_proc_away(plain: SandboxTask):
    if "proc" not in plain.cut_off:
        pytest.skip("this kernel gives no private /proc here")
    # The first process of the namespace, and itself.
    assert plain.reward(plain.train(0), "uncover") <= 2


def test_a_process_that_refuses_to_die_with_its_keeper_dies(folder: Path, tmp_path: Path):
    mark = tmp_path / "mark"
    mark.touch()
    task = opened(folder, mark=str(mark))
    if "processes" not in task.cut_off:
        pytest.skip("this kernel gives no namespace of processes here")
    with pytest.raises(TaskFailed, match=r"longer than 1\.5 s"):
        task.reward(task.train(0), "stay")
    task.close()
    # Nobody asked for its end but the keeper's, which has been waited for.
    deadline, last, still = time.monotonic() + 10, 0, 0
    while still < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
        now = mark.stat().st_mtime_ns
        last, still = now, still + 1 if now == last else 0
    assert still == 3


def test_a_task_that_stops_its_whole_group_is_killed(plain: SandboxTask):
    with pytest.raises(TaskFailed, match=r"longer than 1\.5 s"):
        plain.reward(plain.train(0), "stay by killing")
    assert plain.reward(plain.train(0), "ok") == 0.2


def test_texts_have_the_same_hash_in_every_process(folder: Path):
    """A task that depends on the order of a set is then the same on every node."""
    hashes = set()
    for _ in range(2):
        task = opened(folder)
        hashes.add(task.reward(task.train(0), "hash"))
        task.close()
    assert len(hashes) == 1


@pytest.mark.parametrize("size", ["-1", "1" + "0" * 400, str(1 << 41)])
def test_a_size_that_can_not_be_is_an_error(folder: Path, size: str):
    task = opened(folder, "x.py:Sized", size=size)
    with pytest.raises(TaskFailed, match="number"):
        _ = task.train_size
    task.close()


def test_a_prompt_that_no_tokenizer_takes_is_an_error(folder: Path):
    task = opened(folder, "x.py:HalfACharacter")
    with pytest.raises(TaskFailed, match="surrogate"):
        task.train(0)
    task.close()


def test_the_network_is_out_of_reach_unless_it_is_granted(folder: Path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        closed, open_ = opened(folder, port=port), opened(folder, port=port, limits={**FAST, "network": True})
        assert "network" not in open_.cut_off
        assert open_.reward(open_.train(0), "network") == 0.7
        if "network" in closed.cut_off:
            with pytest.raises(TaskFailed, match=r"unreachable|refused|denied"):
                closed.reward(closed.train(0), "network")
        closed.close()
        open_.close()


def test_slow_rewards_run_side_by_side(folder: Path):
    task = opened(folder, limits={"timeout_s": 10, "processes": 4})
    prompt = task.train(0)
    threads = [threading.Thread(target=task.reward, args=(prompt, "ok")) for _ in range(4)]
    run_all(threads)
    began = time.monotonic()
    run_all([threading.Thread(target=task.reward, args=(prompt, "slow")) for _ in range(8)])
    assert time.monotonic() - began < 8 * 0.5
    task.close()


def run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


@pytest.mark.parametrize(
    ("name", "params", "limits", "error", "says"),
    [
        ("x.py:Nothing", {}, {}, BadInput, "has no Nothing"),
        ("x.py:NOT_CALLABLE", {}, {}, BadInput, "not a class or function"),
        ("x.py:Half", {}, {}, BadInput, "no train_size, heldout_size, train, heldout, reward"),
        ("x.py:Broken", {}, {}, BadInput, "no episode_reward"),
        ("x.py:Plain", {"load": "raise"}, {}, BadInput, "no such level"),
        ("x.py:Plain", {"load": "bad"}, {}, BadInput, "level is 1 to 3"),
        ("x.py:Plain", {"load": "hang"}, {"load_timeout_s": 1.5}, TaskFailed, "longer than 1.5 s"),
    ],
)
def test_what_does_not_load_says_why(folder: Path, name: str, params: Any, limits: Any, error: type, says: str):
    with pytest.raises(error, match=says) as caught:
        opened(folder, name, limits={**FAST, **limits}, **params)
    if error is BadInput:
        assert caught.value.errors[0].pointer.startswith("/task/")


@pytest.mark.parametrize(("source", "says"), [("x = (", "SyntaxError"), ("import nothing_like_it", "ModuleNotFound")])
def test_a_source_that_can_not_be_imported_says_why(tmp_path: Path, source: str, says: str):
    (tmp_path / "source.py").write_text(source)
    with pytest.raises(BadInput, match=says):
        opened(tmp_path)


def test_several_turns_go_through_the_sandbox(folder: Path):
    task = opened(folder, "x.py:Turns")
    assert is_multi_turn(task)
    assert not is_deterministic(task)
    prompt = task.train(0)
    reply = task.respond(prompt, ["a", "b"])
    assert reply is not None
    assert reply.text == "so far a/b"
    assert task.respond(prompt, ["a", "b", "c"]) is None
    assert task.episode_reward(prompt, ["a", "b", "c"]) == 3.0
    task.close()


def test_closing_ends_its_processes_and_all_calls(folder: Path):
    """One call is under way and two wait for its process."""
    task = opened(folder, limits={"timeout_s": 60, "processes": 1})
    prompt = task.train(0)
    failed: list[str] = []

    def ask() -> None:
        try:
            task.reward(prompt, "hang")
        except TaskFailed as error:
            failed.append(error.detail)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    task.close()
    for thread in threads:
        thread.join(15)
    assert len(failed) == 3
    with pytest.raises(TaskFailed, match="closed"):
        task.reward(prompt, "ok")


def test_a_process_that_ends_between_two_calls_is_replaced(folder: Path):
    task = opened(folder)
    prompt = task.train(0)
    process = task._pool._free.queue[-1]
    os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while process.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert task.reward(prompt, "ok") == 0.2
    assert len(task._pool._alive) == 1
    task.close()


def test_a_built_in_task_can_be_sandboxed_and_is_the_same():
    params = {"dataset": "gcd", "size": 20}
    here = load_task(TaskSpec(name="reasoning_gym", params=params), 3)
    there = load_task(TaskSpec(name="reasoning_gym", params=params, limits={"builtin": True, "processes": 1}), 3)
    assert isinstance(there, SandboxTask)
    assert not isinstance(here, SandboxTask)
    assert [there.train(i).text for i in range(5)] == [here.train(i).text for i in range(5)]
    assert there.reward(there.train(0), here.train(0).entry["answer"]) == 1.0
    there.close()


def test_its_processes_die_with_a_parent_that_is_killed(folder: Path):
    code = textwrap.dedent(f"""
        import sys, threading
        from pathlib import Path
        from app.protocol.task_spec import TaskSpec
        from app.tasks.registry import load_task
        spec = TaskSpec(name="x.py:Plain", limits={{"timeout_s": 60, "processes": 1}})
        task = load_task(spec, 0, Path({str(folder)!r}))
        [process] = task._pool._alive
        print(process.pid, flush=True)
        task.reward(task.train(0), "hang")
    """)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    leader = int(parent.stdout.readline())
    group = members(leader)
    # The keeper, the first of the namespace where there is one, and the task's.
    assert len(group) in (2, 3)
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while members(leader) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members(leader) == set()


@pytest.mark.parametrize("loop", ["while True: pass", "import re; re.match('(a+)+b', 'a' * 60)"])
def test_the_kernel_ends_what_computes_too_long_should_nobody_else(loop: str):
    code = f"from app.tasks.confine import allow_cpu, confine\nconfine(1 << 30)\nallow_cpu(0)\n{loop}"
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, stdin=subprocess.DEVNULL)
    assert ended.returncode == signal.SIGXCPU


def test_root_without_namespaces_of_users_keeps_its_own_proc():
    """The private /proc is mounted in a mount namespace of its own, or nobody's is."""
    code = textwrap.dedent("""
        import ctypes, os, sys
        from app.tasks import confine
        libc = ctypes.CDLL(None)
        # So that a fault breaks this process's /proc and no other's.
        if libc.unshare(confine._NEWNS) or libc.mount(b"none", b"/", None, confine._MS_REC | confine._MS_PRIVATE, None):
            sys.exit(77)
        confine._WAYS = [way for way in confine._WAYS if not way[0] & confine._NEWUSER]
        pid = os.fork()
        if not pid:
            cut = confine.confine(1 << 30)
            os._exit(0 if "proc" in cut else 77)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.exit(status or not os.path.exists(f"/proc/{os.getpid()}/stat"))
    """)
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, stdin=subprocess.DEVNULL)
    if ended.returncode == 77:
        pytest.skip("this user may make no namespaces without one of users")
    assert ended.returncode == 0


def members(session: int) -> set[int]:
    """Living processes of a session."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.add(int(path.parent.name))
    return found
