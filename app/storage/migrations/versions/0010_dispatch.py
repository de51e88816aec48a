"""groups that other nodes go on with, group sizes, statistics of prompts, tokens of no use"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

ITEM_COLUMNS = {
    "group_size": sa.BigInteger,
    "partial_key": sa.String,
    "partial_size": sa.BigInteger,
    "partial_blake3": sa.String,
    "partial_version": sa.BigInteger,
    "partial_tokens": sa.BigInteger,
    "partial_node": sa.String,
}


def upgrade() -> None:
    """Go to this revision: groups that other nodes go on with, group sizes, statistics of prompts, tokens of no use."""
    for name, kind in ITEM_COLUMNS.items():
        op.add_column("work_items", sa.Column(name, kind(), nullable=True))
    op.add_column("work_items", sa.Column("written_by", sa.JSON(), nullable=False, server_default="[]"))
    op.create_index("ix_work_items_partial", "work_items", ["partial_key"])
    op.add_column("nodes", sa.Column("tokens_generated", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("nodes", sa.Column("tokens_wasted", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("jobs", sa.Column("tokens_wasted", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("jobs", sa.Column("length_mean", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("failure_rate", sa.Double(), nullable=True))
    op.create_table(
        "prompt_stats",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("prompt_index", sa.BigInteger(), nullable=False),
        sa.Column("tries", sa.BigInteger(), nullable=False),
        sa.Column("successes", sa.Double(), nullable=False),
        sa.Column("mean_length", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_prompt_stats_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "prompt_index", name=op.f("pk_prompt_stats")),
    )
    op.create_table(
        "group_prints",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("work_item", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_group_prints_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "fingerprint", name=op.f("pk_group_prints")),
    )


def downgrade() -> None:
    """Go back to the revision before; what only this one holds is lost."""
    op.drop_table("group_prints")
    op.drop_table("prompt_stats")
    for name in ("failure_rate", "length_mean", "tokens_wasted"):
        op.drop_column("jobs", name)
    for name in ("tokens_wasted", "tokens_generated"):
        op.drop_column("nodes", name)
    op.drop_index("ix_work_items_partial", "work_items")
    for name in ("written_by", *reversed(ITEM_COLUMNS)):
        op.drop_column("work_items", name)
