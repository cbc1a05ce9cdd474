"""What this host can enforce: every line tried, and the command that fixes what is missing."""

from __future__ import annotations

from ringfence.backends.contract import BackendReport, Finding
from ringfence.doctor.examination import examine
from ringfence.doctor.report import Report

__all__ = ["BackendReport", "Finding", "Report", "examine"]
