"""EC2 spot instances. Invariant: every call goes out once; a create carries a token made of the intent's label."""

from .adapter import EC2Spot
from .config import Ec2Config

__all__ = ["EC2Spot", "Ec2Config"]
