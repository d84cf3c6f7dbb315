"""Lightning's Trainer on elastic workers: ``import phalanx.lightning``, then ``Trainer(strategy="phalanx")``.

Checks the installed release and the private names that are used, and registers the strategy.
"""

from __future__ import annotations

from phalanx.integrations.frameworks import Framework

_SAVES = "lightning.pytorch.callbacks:ModelCheckpoint"
_CONNECTORS = "lightning.pytorch.trainer.connectors"
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
        "lightning.pytorch:Trainer._results",
        "lightning.pytorch:Trainer.__init__=_checkpoint_connector",
        "lightning.pytorch:Trainer.__init__=_logger_connector",
        "lightning.pytorch.trainer.setup:_init_debugging_flags=_val_check_time_interval",
        "lightning.pytorch.loops.optimization.automatic:Closure.__init__=_zero_grad_fn",
        "lightning.pytorch.loops.optimization.closure:AbstractClosure.__init__=_result",
        "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop.__init__=_results",
        "lightning.pytorch.trainer.call:_call_strategy_hook=_current_fx_name",
        f"{_CONNECTORS}.logger_connector.result:_ResultCollection.log",
        f"{_CONNECTORS}.logger_connector.result:_ResultCollection.update_metrics",
        f"{_CONNECTORS}.logger_connector.logger_connector:_LoggerConnector.__init__=_current_fx",
        f"{_CONNECTORS}.logger_connector.result:_ResultMetric.__init__=_forward_cache",
        f"{_CONNECTORS}.logger_connector.result:_ResultMetric.__init__=has_reset",
        f"{_CONNECTORS}.logger_connector.logger_connector:_LoggerConnector.__init__=_callback_metrics",
        f"{_CONNECTORS}.logger_connector.logger_connector:_LoggerConnector.__init__=_first_loop_iter",
        f"{_CONNECTORS}.logger_connector.logger_connector:_LoggerConnector.__init__=_logged_metrics",
        f"{_CONNECTORS}.logger_connector.logger_connector:_LoggerConnector.__init__=_progress_bar_metrics",
        f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector.__init__=_ckpt_path",
        f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector.__init__=_loaded_checkpoint",
        f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector.dump_checkpoint",
        f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector.restore_callbacks",
        f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector.restore_datamodule",
        f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector.restore_loops",
        f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector.restore_lr_schedulers",
        f"{_SAVES}.__init__=_last_global_step_saved",
        f"{_SAVES}.__init__=_last_checkpoint_saved",
        f"{_SAVES}.__init__=_defer_save_until_validation",
        f"{_SAVES}.setup=_fs",
        f"{_SAVES}._link_checkpoint",
        f"{_SAVES}.file_exists",
        "lightning.pytorch.plugins.precision.precision:Precision._after_closure",
        "lightning.pytorch.plugins.precision.precision:Precision.pre_backward",
        "lightning.fabric.loggers.csv_logs:CSVLogger.__init__=_flush_logs_every_n_steps",
        "lightning.fabric.loggers.csv_logs:CSVLogger.__init__=_version",
        "lightning.fabric.loggers.csv_logs:_ExperimentWriter.__init__=metrics_keys",
        "lightning.fabric.loggers.tensorboard:TensorBoardLogger.__init__=_version",
        "lightning.fabric.utilities.rank_zero:rank_zero_only.rank",
    ),
)
"""What this adapter was tried with."""

LIGHTNING.check()

from phalanx.lightning._strategy import ElasticStrategy  # noqa: E402  # after the check: it imports lightning

__all__ = ["ElasticStrategy"]
