"""what a start downloads: kept back until the bill is known"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision. For leases that are there nothing is kept back."""
    for name in ("image_micros", "model_micros"):
        op.add_column("leases", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Go back to the revision before."""
    for name in ("model_micros", "image_micros"):
        op.drop_column("leases", name)
