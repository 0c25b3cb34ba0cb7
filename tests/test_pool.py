"""The grader pool against rules that hang, eat memory, crash and leave: other verdicts are right, and the pool stays whole."""

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from fractions import Fraction
from pathlib import Path

import pytest

import pool_rules as rules
from nevergiveup.grading.pool import GraderPool, check_canaries
from nevergiveup.loop import GraderBroken, TaskGrader
from nevergiveup.types import Check, Completion, Prompt, Score, Unverified

pytestmark = pytest.mark.slow

RIGHT, WRONG = Check(rules.same, (5, 5)), Check(rules.same, (5, 6))
LIMIT_S = 0.5
"""For rules that hang. What must not be killed runs in `patient`: on a busy machine half a second can pass in no time."""


@pytest.fixture(scope="module")
def patient():
    with GraderPool(2, timeout_s=60, memory_mb=200) as pool:
        pool.start()
        yield pool


@pytest.fixture(scope="module")
def hasty():
    with GraderPool(2, timeout_s=LIMIT_S, memory_mb=200) as pool:
        pool.start()
        yield pool


def until(condition, within=20.0):
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def whole(pool, n=2):
    until(lambda: pool.counters()["n_workers"] == n)
    return True


def reason(grade):
    assert isinstance(grade, Unverified), grade
    return grade.reason


def lives(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- grades


def test_grades_come_back_exact_and_with_their_story(patient):
    assert [patient.grade(RIGHT), patient.grade(WRONG)] == [1, 0]
    assert patient.grade(Check(rules.story, ("42",))) == Score(Fraction(1, 3), "because", "42", {"part": 0.5})
    assert patient.grade(Check(rules.undecided, ())) == Unverified("no idea")
    assert patient.grade(Check(rules.returns, (0.1,))) == Fraction(0.1)
    assert patient.grade(Check(rules.returns, (True,))) == 1
    assert patient.grade(Check(rules.story, ("\ud800 € \x00",))).answer == "\ud800 € \x00"


def test_large_checks_and_large_grades_pass(patient):
    assert patient.grade(Check(rules.length, (b"x" * 20_000_000,))) == 20_000_000
    futures = [patient.submit(Check(rules.story, ("42", 1_000_000))) for _ in range(4)]
    assert [len(future.result().reason) for future in futures] == [7_000_000] * 4
    assert "21000" in reason(patient.grade(Check(rules.story, ("42", 3_000_000))))  # bytes: more than a grade may take


@pytest.mark.parametrize(
    "value", ["1", None, float("nan"), [1], Score(float("inf")), Score(1, parts={"a": "b"}), Score(1, {1})]
)
def test_what_is_no_grade_is_no_verdict(patient, value):
    assert reason(patient.grade(Check(rules.returns, (value,))))
    assert patient.grade(RIGHT) == 1


def test_what_a_rule_raises_is_told_with_its_traceback(patient):
    told = reason(patient.grade(Check(rules.raises, ("boom",))))
    assert told.strip().endswith("RuntimeError: boom")
    assert "pool_rules.py" in told
    assert "SystemExit: 3" in reason(patient.grade(Check(rules.exits, (3,))))
    assert "RecursionError" in reason(patient.grade(Check(rules.recurses, ())))
    assert whole(patient)


def test_checks_that_cannot_be_sent_are_refused_with_the_remedy(patient):
    with pytest.raises(ValueError, match=r"<lambda>.*importable by name"):
        patient.submit(Check(lambda: 1, ()))
    with pytest.raises(ValueError, match="arguments picklable"):
        patient.submit(Check(rules.returns, (threading.Lock(),)))


# -- the clock


@pytest.mark.parametrize("rule", [rules.spin, rules.deaf_spin, rules.tower, rules.leaves_its_group_and_spins])
def test_the_clock_kills_and_the_next_check_is_right(hasty, rule):
    began = time.monotonic()
    assert reason(hasty.grade(Check(rule, ()))) == f"timeout: no grade within {LIMIT_S} s"
    assert LIMIT_S <= time.monotonic() - began < LIMIT_S + 1
    assert whole(hasty)


def test_c15_fifty_bombs_among_hundred_checks():
    with GraderPool(3, timeout_s=LIMIT_S, memory_mb=200) as pool:
        bombs = [
            Check((rules.tower, rules.sleep, rules.sleep)[i % 3], ((), (1000,), (1000,))[i % 3]) for i in range(50)
        ]
        futures = []
        for i, bomb in enumerate(bombs):
            futures += [pool.submit(bomb), pool.submit(Check(rules.same, (i % 2, 1))), pool.submit(RIGHT)]
        grades = [future.result() for future in futures]
        assert {reason(grade) for grade in grades[::3]} == {f"timeout: no grade within {LIMIT_S} s"}
        assert grades[1::3] == [i % 2 for i in range(50)]
        assert grades[2::3] == [1] * 50
        assert whole(pool, 3)
        assert pool.counters()["n_timeouts"] == 50


def test_the_clock_starts_with_the_grading_and_not_with_the_queue():
    with GraderPool(1, timeout_s=1) as pool:
        futures = [pool.submit(Check(rules.sleep, (0.3,))) for _ in range(6)]
        assert [future.result() for future in futures] == [1] * 6


# -- memory


def test_memory_is_bounded_and_the_next_check_is_right(patient):
    before = patient.counters()
    for _ in range(3):
        assert reason(patient.grade(Check(rules.eat, ()))) == "memory: more than 200 MiB"
        assert patient.grade(RIGHT) == 1
    assert patient.counters()["n_out_of_memory"] == before["n_out_of_memory"] + 3
    assert patient.counters()["n_died"] == before["n_died"]
    assert whole(patient)


def test_a_rule_that_keeps_memory_gets_a_fresh_worker():
    with GraderPool(1, timeout_s=60, memory_mb=200) as pool:
        assert [pool.grade(Check(rules.keeps, (60 << 20,))) for _ in range(5)] == [1, 2, 1, 2, 1]


# -- death


def test_workers_that_are_killed_by_hand_lose_no_verdict():
    with GraderPool(3, timeout_s=60) as pool:
        pool.start()
        futures = [pool.submit(Check(rules.sleep, (0.02,))) for _ in range(60)]
        first = {future.result() for future in [pool.submit(Check(rules.process, (i,))) for i in range(6)]}
        futures += [pool.submit(Check(rules.same, (i % 2, 1))) for i in range(60)]
        for process in first:
            os.kill(process, signal.SIGKILL)
        assert [future.result() for future in futures] == [1] * 60 + [i % 2 for i in range(60)]
        assert whole(pool, 3)
        until(lambda: not any(lives(process) for process in first))
        assert pool.counters()["n_died"] == len(first)


def test_who_is_killed_from_outside_is_tried_once_more_and_who_dies_is_not(patient, tmp_path):
    assert patient.grade(Check(rules.die_once, (str(tmp_path / "a"),))) == 1
    assert patient.grade(Check(rules.dies_in_mid_answer, (str(tmp_path / "b"),))) == 1
    assert reason(patient.grade(Check(rules.crash, ()))) == "worker died by signal 11"
    assert reason(patient.grade(Check(rules.leave, (7,)))) == "worker died with status 7"
    assert reason(patient.grade(Check(rules.leave, (0,)))) == "worker died with status 0"
    assert whole(patient)


def test_idle_workers_that_are_killed_are_replaced(patient):
    for _ in range(2):
        process = patient.grade(Check(rules.process, ()))
        before = patient.counters()["n_died"]
        os.kill(process, signal.SIGKILL)
        until(lambda before=before: patient.counters()["n_died"] == before + 1)
        assert whole(patient)
        assert patient.grade(RIGHT) == 1


# -- manners


def test_rude_rules_harm_nobody(patient, capfd):
    for rule in rules.RUDE:
        assert [patient.grade(Check(rule, ())) for _ in range(2)] == [1, 1], rule
        assert patient.grade(Check(rules.chatter, ())) == 1, rule
        assert patient.grade(Check(rules.sleep, (0.1,))) == 1, rule
    assert "both of us" in reason(patient.grade(Check(rules.fork_and_raise, ())))
    for rule in (rules.close_everything, rules.close_everything_and_spin, rules.announces_much):
        assert reason(patient.grade(Check(rule, ()))).startswith("worker")
    for text in (b"GET / HTTP/1.1\r\n\r\n", (2).to_bytes(8, "big") + b"[]", (1).to_bytes(8, "big") + b"!"):
        assert reason(patient.grade(Check(rules.garbles, (text,)))).startswith("worker")
    assert patient.grade(RIGHT) == 1
    assert whole(patient)
    assert capfd.readouterr() == ("", "")


def test_what_a_killed_check_has_started_is_killed_too(hasty, tmp_path):
    path = tmp_path / "process"
    assert reason(hasty.grade(Check(rules.sandbox, (str(path),)))).startswith("timeout")
    started = int(Path(f"{path}.done").read_text())
    until(lambda: not lives(started))


def test_ctrl_c_in_the_terminal_does_not_reach_the_workers(patient):
    assert patient.grade(Check(rules.session, ())) not in (os.getsid(0), 0)


# -- cache


def test_equal_keys_are_worked_out_once_and_no_verdict_is_not_kept():
    with GraderPool(2, timeout_s=60, cache_size=2) as pool:
        pool.start()
        slow = Check(rules.sleep, (0.2,), key="k")
        assert {future.result() for future in [pool.submit(slow) for _ in range(20)]} == {1}
        assert pool.grade(slow) == 1
        assert (pool.counters()["n_checked"], pool.counters()["n_cached"]) == (1, 20)
        for _ in range(2):
            assert reason(pool.grade(Check(rules.undecided, (), key="u"))) == "no idea"
        assert pool.counters()["n_checked"] == 3
        assert pool.grade(Check(rules.same, (1, 2), key="k")) == 0  # another function: another grade
        pool.grade(Check(rules.same, (1, 1), key="l"))  # the second of two that are kept: the slow one is forgotten
        pool.grade(slow)
        assert pool.counters()["n_checked"] == 6
        assert pool.counters()["n_cached"] == 20


# -- from everywhere


def test_c16_the_same_verdicts_from_threads_and_tasks(hasty):
    pair = (RIGHT, WRONG)
    found = []
    threads = [threading.Thread(target=lambda: found.append([hasty.grade(check) for check in pair])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[1, 0]] * 8

    async def in_a_task():
        return await asyncio.gather(*(hasty.check(check) for check in pair), hasty.check(Check(rules.spin, ())))

    right, wrong, bomb = asyncio.run(in_a_task())
    assert [right, wrong] == [1, 0]
    assert reason(bomb).startswith("timeout")


def _in_a_process(answers, pool):
    with pool or GraderPool(1, timeout_s=LIMIT_S) as pool:
        answers.put([pool.grade(RIGHT), pool.grade(WRONG), reason(pool.grade(Check(rules.spin, ())))])


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_c16_and_from_a_daemonic_child_process(method, hasty):
    """A forked child may use, and close, the pool that it inherits: it gets processes of its own."""
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    running = hasty.submit(Check(rules.sleep, (0.3,)))
    child = context.Process(target=_in_a_process, args=(answers, hasty if method == "fork" else None), daemon=True)
    child.start()
    assert answers.get(timeout=60) == [1, 0, f"timeout: no grade within {LIMIT_S} s"]
    child.join(10)
    assert child.exitcode == 0
    assert running.result() == 1
    assert hasty.grade(RIGHT) == 1


def test_two_pools_do_not_meet(patient):
    with GraderPool(1, timeout_s=60) as other:
        assert other.grade(Check(rules.nursery, ())) != patient.grade(Check(rules.nursery, ()))
    assert patient.grade(RIGHT) == 1


# -- cancellation


def test_a_check_that_nobody_waits_for_is_not_begun(tmp_path):
    with GraderPool(1, timeout_s=60) as pool:
        pool.start()
        running = pool.submit(Check(rules.sleep, (0.3,)))
        for key in (None, "k"):
            queued = pool.submit(Check(rules.die_once, (str(tmp_path / "never"),), key))
            assert queued.cancel()
        joined = [pool.submit(Check(rules.same, (1, 1), "both")) for _ in range(2)]
        assert joined[0].cancel()
        assert running.result() == 1
        assert joined[1].result() == 1
        assert pool.grade(Check(rules.same, (1, 1), "k")) == 1
        assert not (tmp_path / "never").exists()


def test_a_task_that_is_cancelled_goes_at_once_and_the_grade_is_kept(patient):
    async def give_up():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await patient.check(Check(rules.sleep, (0.5,), key="slow"))
        assert await patient.check(RIGHT) == 1

    asyncio.run(give_up())
    before = patient.counters()["n_checked"]
    assert patient.grade(Check(rules.sleep, (0.5,), key="slow")) == 1
    assert patient.counters()["n_checked"] - before <= 1


# -- the end


def test_a_rule_that_sleeps_for_ever_does_not_hold_up_the_end():
    pool = GraderPool(2, timeout_s=10**6)
    pool.start()
    processes = [pool.grade(Check(rules.process, ())), pool.grade(Check(rules.nursery, ()))]
    sleepers = [pool.submit(Check(rules.sleep, (10**6,))) for _ in range(2)]
    sleepers += [pool.submit(Check(rules.deaf_spin, (), key="k")) for _ in range(2)]
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 5
    assert [reason(future.result(timeout=0)) for future in sleepers] == ["the grader pool was closed"] * 4
    assert not any(lives(process) for process in processes)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(RIGHT)


def test_a_pool_can_be_closed_while_it_starts_and_from_a_callback():
    pool = GraderPool(1, preload=("slow_preload",))
    future = pool.submit(RIGHT)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 5
    assert reason(future.result(timeout=0)) == "the grader pool was closed"

    pool = GraderPool(1)
    pool.submit(RIGHT).add_done_callback(lambda _: pool.close())
    until(lambda: not pool._dispatcher.is_alive())


def test_a_pool_that_is_dropped_finishes_its_checks_and_ends_its_processes():
    pool = GraderPool(1)
    process = pool.grade(Check(rules.process, ()))
    last = pool.submit(Check(rules.sleep, (0.2,)))
    gone = weakref.ref(pool)
    del pool
    assert last.result() == 1
    until(lambda: gc.collect() is not None and gone() is None and not lives(process))


def in_a_program(code):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )


PROGRAM = """
    import sys
    import pool_rules as rules
    from nevergiveup.grading.pool import GraderPool
    from nevergiveup.types import Check
    pool = GraderPool(2)
    pool.submit(Check(rules.sleep, (1000,)))
    print(pool.grade(Check(rules.process, ())), pool.grade(Check(rules.nursery, ())), flush=True)
"""


@pytest.mark.parametrize(
    ("rest", "how"),
    [
        ("pool.grade(Check(rules.sleep, (1000,)))", "kill"),
        ("pool.grade(Check(rules.sleep, (1000,)))", "interrupt"),
        ("", "end"),
    ],
)
def test_when_the_program_goes_its_workers_go_too(rest, how):
    with in_a_program(PROGRAM + "    " + rest) as program:
        processes = [int(word) for word in program.stdout.readline().split()]
        if how == "kill":
            program.kill()
        elif how == "interrupt":  # Ctrl-C: the whole group
            os.killpg(program.pid, signal.SIGINT)
        began = time.monotonic()
        errors = program.communicate(timeout=20)[1]
        assert time.monotonic() - began < 5
        until(lambda: not any(lives(process) for process in processes), within=5)
        assert errors.count("Traceback") == (how == "interrupt"), errors


# -- the nursery


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_nursery_is_replaced_and_no_verdict_is_lost(how):
    with GraderPool(2, timeout_s=LIMIT_S) as pool:
        for _ in range(2 if how == signal.SIGKILL else 1):
            nursery, worker = pool.grade(Check(rules.nursery, ())), pool.grade(Check(rules.process, ()))
            os.kill(nursery, how)
            if how == signal.SIGSTOP:  # noticed when it is to kill
                assert reason(pool.grade(Check(rules.spin, ()))).startswith("timeout")
            assert pool.grade(RIGHT) == 1
            until(lambda nursery=nursery: pool.grade(Check(rules.nursery, ())) != nursery)
            until(lambda nursery=nursery, worker=worker: not lives(nursery) and not lives(worker))
        assert whole(pool)


def test_modules_are_imported_once_before_the_workers():
    with GraderPool(2, preload=("colorsys", "wave")) as pool:
        assert pool.grade(Check(rules.modules, ("colorsys",))) == 1
        assert pool.grade(Check(rules.modules, ("sndhdr",))) == 0
        reason(pool.grade(Check(rules.leave, (1,))))
        assert pool.grade(Check(rules.modules, ("wave",))) == 1


def test_a_module_that_cannot_be_imported_is_one_clear_error(capfd):
    expected = "import of broken_preload failed: ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    with GraderPool(1, preload=("broken_preload",)) as pool:
        for attempt in (pool.start, lambda: pool.grade(RIGHT), lambda: asyncio.run(pool.check(RIGHT))):
            with pytest.raises(GraderBroken, match=expected):
                attempt()
    assert capfd.readouterr() == ("", "")


def test_an_interpreter_that_does_not_start_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with GraderPool(1) as pool, pytest.raises(GraderBroken, match=r"cannot be started.*No such file"):
        pool.start()
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho no luck >&2\nexit 3\n")
    script.chmod(0o755)
    with GraderPool(1) as pool, pytest.raises(GraderBroken, match="status 3: no luck"):
        pool.grade(RIGHT)


@pytest.mark.parametrize(
    "bad",
    [
        {"n_workers": 0},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"memory_mb": 0},
        {"cache_size": -1},
        {"preload": "re"},
    ],
)
def test_bad_options_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} of a grader pool"):
        GraderPool(**bad)


# -- canaries


class Echo:
    def prompts(self, split):
        return []

    def grade(self, prompt, completion):
        return (
            Check(rules.returns, (None,))
            if completion.text == "?"
            else Check(rules.same, (prompt.answer, completion.text))
        )


def test_canaries_that_come_out_wrong_stop_everything(patient):
    def canary(text, expected):
        return Prompt("canary", answer="5"), Completion((), (), text, "stop", 0, 0), expected

    asyncio.run(check_canaries(TaskGrader(Echo(), patient), [canary("5", 1), canary("6", 0)]))
    with pytest.raises(GraderBroken, match=r"'6' to canary \(gold answer '5'\) must score 1, but got 0"):
        asyncio.run(check_canaries(TaskGrader(Echo(), patient), [canary("5", 1), canary("6", 1)]))
    with pytest.raises(GraderBroken, match=r"must score 0, but got no verdict: .*"):
        asyncio.run(check_canaries(TaskGrader(Echo(), patient), [canary("?", 0)]))
