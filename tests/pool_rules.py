"""Rules that the tests of the grader pool hand to its workers: good ones, slow ones, hungry ones, rude ones."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from fractions import Fraction

from nevergiveup.types import Score, Unverified


def same(a, b):
    return int(a == b)


def returns(value):
    return value


def story(text, n=1):
    return Score(Fraction(1, 3), "because" * n, text, {"part": 0.5})


def undecided():
    return Unverified("no idea")


def length(data):
    return len(data)


def raises(text):
    raise RuntimeError(text)


def exits(status):
    sys.exit(status)


def recurses():
    return recurses()


def sleep(seconds):
    time.sleep(seconds)
    return 1


def process(_=None):
    return os.getpid()


def nursery():
    return os.getppid()


def session():
    return os.getsid(0)


def modules(name):
    return name in sys.modules


# -- for ever


def spin():
    while True:
        pass


def tower():
    return 9 ** (9 ** (9**9)) and 1


def deaf_spin():
    """Does what it can not to be stopped."""
    for name in range(1, signal.NSIG):
        with suppress(OSError, ValueError):
            signal.signal(name, signal.SIG_IGN)
    while True:
        with suppress(BaseException):
            while True:
                pass


def leaves_its_group_and_spins():
    os.fork()
    os.setsid() if os.getpid() != os.getpgid(0) else None
    spin()


def sandbox(path):
    """Starts a process in a session of its own, as runners of generated code do, writes its identifier and waits for it."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(path, "w") as file:
        file.write(str(child.pid))
    os.replace(path, path + ".done")
    child.wait()


# -- memory


def eat():
    held = []
    while True:
        held.append(bytearray(16 << 20))


KEPT = []


def keeps(n_bytes):
    KEPT.append(bytearray(n_bytes))
    return len(KEPT)


# -- death


def crash():
    ctypes.string_at(0)


def leave(status):
    os._exit(status)


def die_once(path):
    """Kills its process at the first try, as something from outside would."""
    if not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1


def dies_in_mid_answer(path):
    """At the first try: the head of an answer and half of it, and then death."""
    if not os.path.exists(path):
        open(path, "w").close()
        os.write(own_socket(), (1000).to_bytes(8, "big") + b'{"reward": [1,')
        os.kill(os.getpid(), signal.SIGKILL)
    return 1


def own_socket():
    import socket

    (found,) = [thing for thing in gc.get_objects() if isinstance(thing, socket.socket) and thing.fileno() >= 0]
    return found.fileno()


# -- manners


def chatter():
    print("out" * 10_000, flush=True)
    print("err" * 10_000, file=sys.stderr, flush=True)
    os.write(1, b"raw")
    os.write(2, b"raw")
    subprocess.run(["echo", "from a child"], check=True)
    return int(sys.stdin.read() == "")


def close_streams():
    os.closerange(0, 3)
    return 1


def close_everything():
    os.closerange(0, 256)
    return 1


def close_everything_and_spin():
    os.closerange(0, 256)
    spin()


def garbles(text):
    os.write(own_socket(), text)
    return 1


def announces_much():
    os.write(own_socket(), (1 << 60).to_bytes(8, "big"))
    spin()


def fork_and_forget():
    os.fork()
    return 1


def fork_and_raise():
    os.fork()
    raise RuntimeError("both of us")


def leaves_a_thread():
    threading.Thread(target=time.sleep, args=(60,)).start()
    return 1


def leaves_an_alarm():
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return 1


def changes_handlers():
    for name in (signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)
    return 1


RUDE = (chatter, close_streams, fork_and_forget, leaves_a_thread, leaves_an_alarm, changes_handlers)
