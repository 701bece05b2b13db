"""Checks before anything is launched whether a run's messages and devices are right for NCCL."""

from gridformer.check.problems import Problem
from gridformer.check.report import Report, check_step, report_of
from gridformer.check.simulate import simulate

__all__ = ["Problem", "Report", "check_step", "report_of", "simulate"]
