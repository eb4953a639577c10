"""The helper that all tests on several processes stand on: results come back, and no failure is lost or left behind."""

import os
import re
import signal
import time

import pytest
import torch
from torch import distributed as dist
from torch.utils.data import DataLoader

from lightning_shard.testing import RanksFailed, processes, ranks, run_ranks


@pytest.mark.parametrize("shift", [1, 5])
@ranks(2)
def test_a_decorated_body_runs_on_every_rank_with_fixtures_and_parameters(tmp_path, shift):
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    total = torch.tensor(dist.get_rank() + shift)
    dist.all_reduce(total)
    assert total == 1 + 2 * shift


class TestInAClass:
    @ranks(1)
    def test_a_method_is_found_too(self, tmp_path):
        assert dist.get_world_size() == 1
        assert tmp_path.exists()


def skip():
    pytest.skip("seen from a rank")


def test_a_skip_on_the_ranks_is_a_skip():
    with pytest.raises(pytest.skip.Exception, match="seen from a rank"):
        run_ranks(skip, 2)


def describe(value, *, key):
    return dist.get_rank(), os.getpid(), os.environ["MARK"], os.getcwd(), value, key, torch.rand(1).item()


def test_results_come_back_in_rank_order_from_fresh_processes_in_this_ones_surroundings(monkeypatch, tmp_path):
    monkeypatch.setenv("MARK", "here")
    monkeypatch.chdir(tmp_path)
    results = [result for _ in range(2) for result in run_ranks(describe, 3, torch.ones(2), key=[1])]
    assert [rank for rank, *_ in results] == [0, 1, 2, 0, 1, 2]
    assert len({pid for _, pid, *_ in results} | {os.getpid()}) == 7
    for _, _, mark, folder, value, key, drawn in results:
        assert (mark, folder, key, drawn) == ("here", str(tmp_path), [1], results[0][-1])
        assert torch.equal(value, torch.ones(2))


def fail_on(*failing):
    others_go_on = torch.ones(1)
    if dist.get_rank() in failing:
        left, right = dist.get_rank(), "nothing"
        assert left == right
    dist.all_reduce(others_go_on)


def test_a_failure_is_reported_first_with_its_values_and_then_where_the_others_were():
    started = time.monotonic()
    with pytest.raises(RanksFailed, match=r"(?s)^rank 1 of 3 failed first.*rank 1 ──.*rank 0 ──") as caught:
        run_ranks(fail_on, 3, 1, timeout_s=60)
    assert time.monotonic() - started < 30
    accounts = caught.value.accounts
    assert next(iter(accounts)) == 1
    assert "assert 1 == 'nothing'" in accounts[1]
    assert sorted(accounts) == [0, 1, 2]
    for rank in (0, 2):
        assert "all_reduce(others_go_on)" in accounts[rank] or "in fail_on" in accounts[rank]


def write_pid_then(folder, what):
    (folder / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
    if what == "hang with workers":
        loader = DataLoader(torch.arange(100), num_workers=1)
        workers = iter(loader)._workers
        (folder / f"worker-{dist.get_rank()}.pid").write_text(str(workers[0].pid))
        if dist.get_rank() == 0:
            dist.barrier()
        time.sleep(1000)
    elif dist.get_rank() == 1:
        what()
    else:
        dist.barrier()


def assert_gone(folder, count):
    pids = [int(file.read_text()) for file in folder.glob("*.pid")]
    assert len(pids) == count
    deadline = time.monotonic() + 5
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.05)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_hang_ends_in_time_with_every_ranks_stack_and_leaves_no_process(tmp_path):
    started = time.monotonic()
    with pytest.raises(RanksFailed, match=r"ranks \[0, 1\] of 2 didn't finish within 4 s") as caught:
        run_ranks(write_pid_then, 2, tmp_path, "hang with workers", timeout_s=4)
    assert time.monotonic() - started < 60
    for account in caught.value.accounts.values():
        assert "in write_pid_then" in account
        assert re.search(r"state [RS], \d+\.\d s of processor time used", account)
    assert "in barrier" in caught.value.accounts[0]
    assert_gone(tmp_path, 4)


def work_on(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "done"


@pytest.mark.long
def test_ranks_that_still_compute_at_the_limit_may_go_on_but_not_for_ever():
    assert run_ranks(work_on, 2, 6.0, timeout_s=4) == ["done"] * 2
    with pytest.raises(RanksFailed, match="didn't finish within 1 s"):
        run_ranks(work_on, 1, 100.0, timeout_s=1)


def segfault():
    os.kill(os.getpid(), signal.SIGSEGV)


def exit_as_a_command_line_does():
    raise SystemExit(2)


@pytest.mark.parametrize(
    ("what", "reason"),
    [(segfault, "SIGSEGV"), (exit_as_a_command_line_does, "SystemExit: 2")],
)
def test_a_rank_that_dies_is_named(tmp_path, what, reason):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(write_pid_then, 2, tmp_path, what)
    assert reason in caught.value.accounts[1]
    assert_gone(tmp_path, 2)


def return_what_does_not_pickle():
    return lambda: None


def test_a_result_that_does_not_pickle_is_an_error_of_its_rank():
    with pytest.raises(RanksFailed, match="pickle"):
        run_ranks(return_what_does_not_pickle, 1)


def never_exit():
    import threading

    threading.Thread(target=time.sleep, args=(1000,)).start()


@pytest.mark.long
def test_a_rank_that_does_not_exit_is_an_error(monkeypatch):
    monkeypatch.setattr(processes, "EXIT_GRACE_S", 1.0)
    with pytest.raises(RanksFailed, match="didn't exit"):
        run_ranks(never_exit, 1)


def fit_and_report(folder):
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    assert not dist.is_initialized()
    trainer.fit(BoringModel())
    return trainer.global_rank, trainer.world_size, trainer.global_step


def test_a_trainer_takes_elastic_ranks_as_its_own(tmp_path):
    assert run_ranks(fit_and_report, 2, tmp_path, elastic=True) == [(0, 2, 2), (1, 2, 2)]
