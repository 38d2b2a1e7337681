"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no defect: nothing here is judged by the time that it takes.
settings.register_profile("asyncrl", deadline=None)
settings.load_profile("asyncrl")
