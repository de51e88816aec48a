"""twins: prompts that two nodes answer, so that their rewards can be compared"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision. Jobs that run get twins from here on."""
    op.create_table(
        "twins",
        sa.Column("second", sa.String(), nullable=False),
        sa.Column("first", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("wanted", sa.JSON(), nullable=False),
        sa.Column("came", sa.JSON(), nullable=True),
        sa.Column("first_node", sa.String(), nullable=True),
        sa.Column("second_node", sa.String(), nullable=True),
        sa.Column("rise", sa.JSON(), nullable=False),
        sa.Column("fall", sa.JSON(), nullable=False),
        sa.Column("compared_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_twins_job_id_jobs")),
        sa.PrimaryKeyConstraint("second", name=op.f("pk_twins")),
        sa.UniqueConstraint("first", name=op.f("uq_twins_first")),
    )
    op.create_index(op.f("ix_twins_job_id"), "twins", ["job_id"])
    op.add_column("nodes", sa.Column("twins", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("nodes", sa.Column("twin_doubt", sa.Double(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Go back to the revision before. Twins that wait would have the lowest places of all: they go, too."""
    op.execute("DELETE FROM work_items WHERE ordinal < 0 AND status IN ('pending', 'leased')")
    op.drop_column("nodes", "twin_doubt")
    op.drop_column("nodes", "twins")
    op.drop_index(op.f("ix_twins_job_id"), "twins")
    op.drop_table("twins")
