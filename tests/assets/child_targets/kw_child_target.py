"""Jobs for the tests of ChildProcess: good ones, and every way of going wrong."""

import errno
import os
import subprocess
import sys
import time

from kernelwright.errors import OutOfResources
from kernelwright.kernels import steps

PRELOADED = [None]


def preload():
    """What a nursery calls."""
    PRELOADED[0] = os.getpid()


def no_more_processes():
    """A nursery on a machine that allows no more processes once it has two children."""
    fork, left = os.fork, [2]

    def limited():
        left[0] -= 1
        if left[0] < 0:
            raise BlockingIOError(errno.EAGAIN, "too many")
        return fork()

    os.fork = limited


def slow_preload():
    """A nursery that takes long."""
    time.sleep(60)


def work(job):
    """Do what the job's first word says."""
    what, *rest = job
    return globals()[f"do_{what}"](*rest)


def do_double(value):
    return 2 * value


def do_pid():
    return os.getpid()


def do_env(name):
    return os.environ.get(name)


def do_parent():
    return os.getppid()


def do_preloaded():
    return PRELOADED[0]


def do_main():
    return sys.modules["__main__"].__dict__.get("__file__"), sys.flags.safe_path


def do_abort(words):
    os.write(2, words.encode())
    os.abort()


def do_exit(code):
    sys.exit(code)


def do_hang(pid_file=None):
    if pid_file is not None:
        helper = subprocess.Popen(["sleep", "600"])
        with open(pid_file, "w") as out:
            out.write(f"{os.getpid()} {helper.pid}")
    print("about to hang", flush=True)
    while True:
        time.sleep(60)


def do_raise(message):
    print("context on stdout", flush=True)
    raise LookupError(message)


def do_resources(message):
    raise OutOfResources(message)


def do_unpicklable():
    return lambda: None


def do_step(name, fail):
    with steps.step(name):
        if fail:
            raise ValueError(f"failed after {name}")


def do_listening():
    return steps.listening()


class Counter:
    """A job function with state, for `init`."""

    def __init__(self, start):
        self.count = start

    def __call__(self, step):
        self.count += step
        return self.count


def broken_init():
    raise RuntimeError("no GPU today")


def hang_on(job):
    """Never done with any job."""
    time.sleep(600)
