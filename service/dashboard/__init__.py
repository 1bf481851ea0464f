"""The pages at `/`: made on the server, without a build step, without anything from another machine."""

from __future__ import annotations

from kernelwright.service.dashboard.pages import install

__all__ = ["install"]
