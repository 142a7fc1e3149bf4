"""A process that is killed while it saves a model leaves the old model, or the new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

KILLS = textwrap.dedent(
    """
    import json, os, random, signal, sys, time
    from pathlib import Path
    import torch
    import otad
    from otad.nets import fc_resnet
    from otad.io import files

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    x = torch.rand(3000, 8, generator=torch.Generator().manual_seed(0))
    models = [otad.defend(fc_resnet((8,), 2, seed=seed), x, (x[:, 0] > 0.5).long())
              for seed in range(2)]

    def fork(version, die_at_rename=0):
        pid = os.fork()
        if pid:
            return pid
        rename, left = os.replace, die_at_rename

        def rename_or_die(source, target):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)

        files.os.replace = rename_or_die
        status = 1
        try:
            models[version % 2].save(folder, version=version)
            status = 0
        finally:
            os._exit(status)

    def tell(pid):
        _, status = os.waitpid(pid, 0)
        model = otad.load(folder)
        version = model.notes["version"]
        expected = models[version % 2].state_dict()
        whole = all(torch.equal(expected[k], v) for k, v in model.state_dict().items())
        left = len(list(folder.iterdir()))
        assert status in (0, signal.SIGKILL), status
        print(json.dumps([status == signal.SIGKILL, version, whole, left]), flush=True)

    start = time.perf_counter()
    tell(fork(0))
    seconds = time.perf_counter() - start
    for version in (1, 3, 5):
        tell(fork(version, die_at_rename=1 + version // 2))
    dice = random.Random(0)
    for version in range(6, 14):
        pid = fork(version)
        time.sleep(dice.uniform(0, seconds))
        os.kill(pid, signal.SIGKILL)
        tell(pid)
    tell(fork(99))
    """
)


def test_killed_saves_leave_the_old_model_or_the_new(tmp_path: Path) -> None:
    """SIGKILL before each of the three renames of a save, then at eight random moments."""
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path / "model")],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, *others, last = (json.loads(line) for line in done.stdout.splitlines())
    assert first == [False, 0, True, 3]
    assert last == [False, 99, True, 3]  # and what the killed ones left is gone
    at_renames, at_random = others[:3], others[3:]
    assert [row[:3] for row in at_renames] == [[True, 0, True]] * 3
    assert [row[3] for row in at_renames] == [4, 5, 6]  # one more whole or partial file each
    previous = 0
    for version, (_, found, whole, _) in enumerate(at_random, start=6):
        assert whole
        assert found in (previous, version)
        previous = found
    assert len(at_random) == 8
    assert any(killed for killed, *_ in at_random)
