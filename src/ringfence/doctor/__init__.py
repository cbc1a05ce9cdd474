"""An examination of what this host can enforce: every part is tried, with the command that fixes what is missing."""

from __future__ import annotations

from ringfence.backends.contract import BackendReport, Finding
from ringfence.doctor.examination import Report, examine

__all__ = ["BackendReport", "Finding", "Report", "examine"]
