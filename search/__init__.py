"""Find the fast schedule: strategies, the session that drives them, the runners that measure, and the answer."""

from kernelwright.search.answer import Answer, Records, find_winner
from kernelwright.search.budget import Budget
from kernelwright.search.open_runner import open_runner
from kernelwright.search.recorded import load_recorded, recorded_path, save_recorded
from kernelwright.search.replay_runner import ReplayRunner
from kernelwright.search.runner import Finals, Runner
from kernelwright.search.session import Progress, Session
from kernelwright.search.strategy import STRATEGIES, Strategy, make_strategy

__all__ = [
    "STRATEGIES",
    "Answer",
    "Budget",
    "Finals",
    "Progress",
    "Records",
    "ReplayRunner",
    "Runner",
    "Session",
    "Strategy",
    "find_winner",
    "load_recorded",
    "make_strategy",
    "open_runner",
    "recorded_path",
    "save_recorded",
]
