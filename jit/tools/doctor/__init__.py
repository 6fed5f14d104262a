"""The doctor: looks at all that a build needs, before anything is built, and says how to mend it.

Each check gives a finding: an error where a build would not work, a warning where something is off.
What can be tried is tried, by the command that a build would run; nothing is left behind, and no
network is needed. It does without torch, which may be what is broken: another process imports it.
"""

from .examine import doctor
from .report import Finding, Report

__all__ = ["Finding", "Report", "doctor"]
