"""TensorBoard's side of the event files.

    python tensorboard_events.py write      writes tests/golden/tensorboard.tfevents with TensorBoard's own classes; the
                                            engine's test writes the same events and compares the bytes
    python tensorboard_events.py check RUN  reads RUN/tb with TensorBoard's own reader and compares every scalar with
                                            RUN/metrics.jsonl
"""

import json
import pathlib
import sys

from tensorboard.backend.event_processing import event_accumulator
from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden" / "tensorboard.tfevents"


def write():
    now = 1700000000.25
    version = event_pb2.Event(wall_time=now, file_version="brain.Event:2")
    start = event_pb2.Event(wall_time=now, step=3)
    start.session_log.status = event_pb2.SessionLog.START
    first = event_pb2.Event(wall_time=now + 1.5, step=3)
    first.summary.value.add(tag="loss_metrics/global_avg_loss", simple_value=7.25)
    first.summary.value.add(tag="lr", simple_value=2.2e-4)
    second = event_pb2.Event(wall_time=now + 3.0, step=1000000)
    second.summary.value.add(tag="expert_load_max_over_mean/layers.1.moe", simple_value=1.0625)
    with open(GOLDEN, "wb") as file:
        writer = RecordWriter(file)
        for event in (version, start, first, second):
            writer.write(event.SerializeToString())


def check(run):
    reader = event_accumulator.EventAccumulator(str(run / "tb"), size_guidance={event_accumulator.SCALARS: 0})
    reader.Reload()
    found = {tag: {event.step: event.value for event in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}
    same = {
        "loss": "loss_metrics/global_avg_loss",
        "grad_norm": "grad_norm",
        "lr": "lr",
        "tokens_per_second": "throughput(tps)",
        "tflops": "tflops",
        "step_seconds": "time_metrics/end_to_end(s)",
        "validation_loss": "validation_metrics/loss",
        "checkpoint_stall_seconds": "time_metrics/checkpoint_stall(s)",
        "checkpoint_seconds": "time_metrics/checkpoint(s)",
    }
    num_compared = 0
    steps = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        step = entry["step"]
        expected = {tag: entry[key] for key, tag in same.items() if key in entry}
        expected |= {f"_overview/{key}": entry[key] for key in ("loss", "lr", "tokens_per_second") if key in entry}
        modules = entry.get("quantization_sqnr_db", {}).values()
        for operand in ("x", "w", "dy"):
            ratios = sorted(module[operand] for module in modules if operand in module)
            if ratios:
                expected[f"quantization_sqnr_db/{operand}_lowest"] = ratios[0]
                expected[f"quantization_sqnr_db/{operand}_median"] = ratios[len(ratios) // 2]
        if entry.get("mfu") is not None:
            expected["mfu(%)"] = 100.0 * entry["mfu"]
        for phase, seconds in entry.get("seconds", {}).items():
            expected["time_metrics/data_loading(s)" if phase == "data" else f"time_metrics/{phase}(s)"] = seconds
        if "memory_bytes" in entry:
            expected["memory/peak_resident(GiB)"] = entry["memory_bytes"] / 2**30
        loads = entry.get("expert_load_per_layer", [])
        load_tags = sorted(tag for tag in found if tag.startswith("moe/expert_load_max_over_mean/"))
        assert not loads or len(loads) == len(load_tags), (loads, load_tags)
        for value, tag in zip(loads, sorted(load_tags, key=lambda tag: [len(tag), tag])):
            expected[tag] = value
        for tag, value in expected.items():
            actual = found[tag][step]
            assert abs(actual - value) <= 1e-6 * max(abs(value), 1e-30), (step, tag, actual, value)
            steps.setdefault(tag, set()).add(step)
            num_compared += 1
    for tag, values in found.items():
        assert set(values) == steps[tag], (tag, sorted(values), sorted(steps[tag]))
    assert num_compared > 0
    print(f"{run}: {num_compared} scalars of {len(found)} tags are those of metrics.jsonl")


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        write()
    elif sys.argv[1:2] == ["check"] and len(sys.argv) == 3:
        check(pathlib.Path(sys.argv[2]))
    else:
        sys.exit(__doc__)
