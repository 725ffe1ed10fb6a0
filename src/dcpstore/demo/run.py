"""The three jobs of the demo, one after the other, and what is compared."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dcpstore.demo.job import JobReport, JobSpec, ModelConfig, train
from dcpstore.demo.launch import deaf_to_interrupts, run_ranks
from dcpstore.demo.report import (
    Check,
    check_final_state,
    check_losses,
    check_restored_state,
    loss_table,
)
from dcpstore.store import open_store
from dcpstore.testing.servers import MotoServer
from dcpstore.text import count_text, size_text, table

BUCKET = "dcpstore-demo"
JOB_TIMEOUT_S = 300.0
IMPORTED_BY_JOBS = ("dcpstore.demo.job", "torch._dynamo")  # an optimizer's first step imports it


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for; see `dcpstore.cli.demo`."""

    save_ranks: int
    load_ranks: int
    num_steps: int
    seed: int
    keep_server: bool
    model: ModelConfig


def run_demo(options: Options, say: Callable[[str], None]) -> list[Check]:
    """Run the demo, tell what happens on the way, and return what was compared.

    Raises:
        RanksError: If a process of a job ended badly or too late.
    """
    with contextlib.ExitStack() as stack:
        with deaf_to_interrupts():
            server = stack.enter_context(MotoServer())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dcpstore-demo-"))
        server.create_bucket(BUCKET)
        say(f"An S3 server is up at {server.endpoint_url}, with the bucket {BUCKET!r}.")
        checks = _Demo(options, Path(folder), server, say).run()
        if options.keep_server:
            _keep(server.endpoint_url, say)
        return checks


class _Demo:
    """The three jobs, one after the other."""

    def __init__(
        self, options: Options, folder: Path, server: MotoServer, say: Callable[[str], None]
    ) -> None:
        half = options.num_steps // 2
        self._say = say
        self.options = options
        self.folder = folder
        self.server = server
        self.spec = JobSpec(
            num_ranks=options.save_ranks,
            first_step=0,
            end_step=options.num_steps,
            url=f"s3://{BUCKET}/run/step-{half}",
            storage_options=server.storage_options(),
            save_before_step=half,
            seed=options.seed,
            weights_seed=options.seed,
            folder=folder,
            model=options.model,
        )

    def run(self) -> list[Check]:
        half = self.spec.save_before_step
        assert half is not None
        self._say(f"\nTraining on {self.spec.num_ranks} ranks, saving to {self.spec.url} ...")
        reference = self._run_job(self.spec, "reference")
        self._say(
            f"  saved {size_text(reference.state_bytes)} of model and optimizer state"
            f" in {reference.checkpoint_s:.1f} s; this is what lies there:"
        )
        self._show_objects()

        checks: list[Check] = []
        curves: dict[str, Sequence[float]] = {}
        expected = reference.losses[half:]
        for num_ranks in dict.fromkeys([self.options.load_ranks, self.options.save_ranks]):
            self._say(
                f"\nA new job with other weights on {num_ranks} rank(s), resuming from there ..."
            )
            # Another weights_seed: were nothing loaded, nothing would agree.
            spec = replace(
                self.spec,
                num_ranks=num_ranks,
                first_step=half,
                save_before_step=None,
                weights_seed=self.options.seed + num_ranks,
            )
            resumed = self._run_job(spec, f"resumed-{num_ranks}")
            self._say(f"  loaded in {resumed.checkpoint_s:.1f} s")
            same_layout = num_ranks == self.options.save_ranks
            curves[f"on {num_ranks} rank(s)"] = resumed.losses
            checks.append(check_restored_state(reference, resumed, num_ranks))
            checks.append(check_losses(expected, resumed.losses, num_ranks, exactly=same_layout))
            if same_layout:
                checks.append(check_final_state(reference, resumed, num_ranks))

        self._say(f"\nLoss per step\n{_indent(loss_table(reference.losses, curves, half))}\n")
        for check in checks:
            self._say(str(check))
        num_passed = sum(check.passed for check in checks)
        self._say(f"\n{num_passed} of {len(checks)} checks passed")
        return checks

    def _run_job(self, spec: JobSpec, name: str) -> JobReport:
        folder = self.folder / name
        folder.mkdir()
        spec = replace(spec, folder=folder)
        start_s = time.perf_counter()
        self.server.clear_requests()
        run_ranks(
            train,
            spec,
            spec.num_ranks,
            timeout_s=JOB_TIMEOUT_S,
            imported_once=IMPORTED_BY_JOBS,
        )
        report = JobReport.read(spec.report_path)
        seconds = time.perf_counter() - start_s
        self._say(f"  {len(report.losses)} steps, {seconds:.1f} s with the start of its processes")
        counts = sorted(self.server.counts().items())
        self._say(f"  requests: {', '.join(f'{count} {name}' for name, count in counts)}")
        return report

    def _show_objects(self) -> None:
        store = open_store(self.spec.url, storage_options=self.spec.storage_options)
        try:
            sizes = {one.key: one.size_bytes for one in store.list()}
        finally:
            store.close()
        title = f"{count_text(len(sizes), 'object')}, {size_text(sum(sizes.values()))}"
        rows = {key: size_text(sizes[key]) for key in sorted(sizes)}
        self._say(_indent(table(title, rows)))


def _keep(endpoint_url: str, say: Callable[[str], None]) -> None:
    say(f"\nThe server stays up at {endpoint_url} until ctrl-C.")
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
