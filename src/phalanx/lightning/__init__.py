"""Lightning's Trainer on elastic workers: ``import phalanx.lightning``, then ``Trainer(strategy="phalanx")``.

Checks the installed release and the private names that are used, and registers the strategy.
"""

from __future__ import annotations

from phalanx.integrations.frameworks import Framework

LIGHTNING = Framework(
    distribution="lightning",
    extra="lightning",
    first=(2, 6),
    before=(2, 7),
    names=(
        "lightning.pytorch.loops.optimization.automatic:Closure.closure",
        "lightning.pytorch.loops.optimization.automatic:ClosureResult",
        "lightning.pytorch.loops.fit_loop:_FitLoop.setup_data",
        "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop.reset",
        "lightning.pytorch.loops.loop:_Loop.restarting",
        "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultCollection.log",
        "lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector.restore_loops",
        "lightning.pytorch.plugins.precision.precision:Precision._after_closure",
        "lightning.pytorch.plugins.precision.precision:Precision.pre_backward",
        "lightning.fabric.utilities.rank_zero:rank_zero_only.rank",
    ),
)
"""What this adapter was tried with."""

LIGHTNING.check()

from phalanx.lightning._strategy import ElasticStrategy  # noqa: E402  # after the check: it imports lightning

__all__ = ["ElasticStrategy"]
