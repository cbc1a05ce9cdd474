"""What this host can enforce: every line tried, and the command that fixes what is missing."""

from __future__ import annotations

from ringfence.doctor.examination import examine
from ringfence.doctor.report import BackendReport, Finding, Report

__all__ = ["BackendReport", "Finding", "Report", "examine"]
