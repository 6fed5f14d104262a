"""The doctor: looks at all that a build needs, before anything is built, and says how to mend it.

Each check looks at one thing and gives its findings: an error where a build would not work, a
warning where it would but something is off. What can be tried is tried, by the command that a build
would run: versions that look right are no proof. Nothing is left behind, and no network is needed.

It does without torch, which may be what is broken: a process of its own imports it.
"""

from .examine import doctor
from .report import Finding, Report

__all__ = ["Finding", "Report", "doctor"]
