from __future__ import annotations

import httpx
import pytest

from app.rollout_agent.redirects import may_go


@pytest.mark.parametrize(
    ("start", "to", "may"),
    [
        ("https://huggingface.co/a", "https://cdn.example.org/b", True),
        ("https://huggingface.co/a", "https://huggingface.co/b", True),
        ("https://huggingface.co/a", "http://huggingface.co/b", False),
        ("https://huggingface.co/a", "http://127.0.0.1/b", False),
        ("https://huggingface.co/a", "ftp://huggingface.co/b", False),
        ("https://huggingface.co/a", "file:///etc/passwd", False),
        ("http://127.0.0.1:80/a", "http://127.0.0.1:81/b", True),
        ("http://localhost:80/a", "http://[::1]:81/b", True),
        ("http://127.0.0.1:80/a", "http://169.254.169.254/b", False),
        ("http://mirror.example.org/a", "http://mirror.example.org/b", False),
        ("http://mirror.example.org/a", "https://mirror.example.org/b", True),
    ],
)
def test_redirects_lead_to_https_or_from_loopback_to_loopback(start: str, to: str, may: bool) -> None:
    assert may_go(httpx.URL(start), httpx.URL(to)) is may
