#!/usr/bin/env python3
"""Injects faults into runs under `tessera launch` in a cluster in a box (lab.sh), and prints how each run recovered.

Every run must
  * end with the losses of an undisturbed run, to the last bit, also in steps that were made twice,
  * notice the fault and train again in time,
  * lose no more steps than its case allows,
  * blame the right rank or node,
  * leave no process, shared memory or open port on any node, not even on one that was thawed or plugged in again.
"""
import argparse
import dataclasses
import glob
import json
import os
import random
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import time
from typing import Callable, Optional

import sickness
from lab import SKIP, Follower, Lab, Skip, losses, make_dataset, train_arguments

MEMORY_HEADER = 64 << 10  # bytes of the header of a copy in memory (src/run/state/memory_copies.h)

# Three nodes with one rank each. With "shards" every rank has its own third of the state, with "replicas" all of it.
MESHES = {
    "shards": {"parallelism.data_parallel_shard_degree": 3},
    "replicas": {"parallelism.data_parallel_replicate_degree": 3, "parallelism.data_parallel_shard_degree": 1},
}


class Missed(Exception):
    """Raised when a run has not done what it should have done."""


class Run:
    """One `tessera launch` on three nodes and a spare."""

    def __init__(self, lab, engine, mesh, steps, keys, launch_options=()):
        self.lab, self.engine, self.steps = lab, engine, steps
        self.dump = os.path.join(lab.shared, "run")
        self.log, self.watch_log = os.path.join(lab.shared, "run.log"), os.path.join(lab.shared, "watch.log")
        self.checkpoints = os.path.join(lab.disk, "checkpoint")
        os.makedirs(self.dump)
        keys = {"checkpoint.enable": "true", "checkpoint.folder": self.checkpoints, "checkpoint.interval": 20,
                "checkpoint.keep_latest_k": 4, "checkpoint.memory_interval": 1, **MESHES[mesh], **keys}
        self.command = [lab.tessera, "launch", "--nodes", "3", "--spares", "1", "--ranks-per-node", "1",
                        *(["--hosts", ",".join(lab.NODES)] if engine == "hosts" else []), *launch_options, "--",
                        *train_arguments(lab.dataset, self.dump, steps, **keys)]
        self.follower = Follower(self.dump)
        self.follower.start()
        if engine == "hosts":
            with open(self.log, "w") as log:
                self.process = subprocess.Popen(lab.command("head", *self.command), stdin=subprocess.DEVNULL, stdout=log,
                                                stderr=subprocess.STDOUT)
        else:
            script = os.path.join(lab.shared, "run.sh")
            with open(script, "w") as file:
                file.write("#!/bin/bash\nexec " + " ".join(self.command) + "\n")
            # Without --no-kill Slurm ends the job with its first lost node. Without --overcommit a node runs one task.
            # A job that is requeued runs without the spare.
            self.job = lab.run("head", "sbatch", "--parsable", "-N3-4", "--no-kill", "--requeue", "--overcommit",
                               "--open-mode=append", "-o", self.log, script).strip()
            with open(self.watch_log, "w") as log:
                self.watcher = subprocess.Popen(lab.command("head", lab.tessera, "watch", self.dump), stdout=log,
                                                stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)

    def status(self):
        """Returns the exit status, or None while the run is running."""
        if self.engine == "hosts":
            return self.process.poll()
        shown = self.lab.run("head", "scontrol", "-o", "show", "job", self.job, timeout=5, check=False)
        if not re.search(r"JobState=(COMPLETED|FAILED|CANCELLED|NODE_FAIL|TIMEOUT|SPECIAL_EXIT)", shown):
            return None
        status, signal_number = map(int, re.search(r"ExitCode=(\d+):(\d+)", shown).groups())
        return status or (128 + signal_number if signal_number else 0)

    def wait(self, timeout):
        deadline = time.time() + timeout
        while self.status() is None:
            if time.time() > deadline:
                raise Missed(f"still runs after {timeout} s")
            time.sleep(0.1)
        self.follower.end()
        if self.engine == "slurm":
            try:
                if self.watcher.wait(10) != 0:
                    raise Missed(f"`tessera watch` ended with {self.watcher.returncode}")
            except subprocess.TimeoutExpired:
                raise Missed("`tessera watch` still runs 10 s after the run's end") from None
        return self.status()

    def wait_for(self, condition, timeout, what):
        """Returns the first step of the Follower for which condition(step) holds."""
        deadline = time.time() + timeout
        while True:
            try:
                return self.follower.wait_for(condition, 1, what)
            except TimeoutError:
                if time.time() > deadline:
                    raise
                if self.status() is not None:
                    raise Missed(f"no {what}: the run ended at step {self.follower.last_step()} with {self.status()}") from None

    def incidents(self):
        found = []
        for path in glob.glob(os.path.join(self.dump, "incidents", "*.json")):
            if os.path.basename(path)[:-5].isdigit():
                with open(path) as file:
                    found.append(json.load(file))
        return sorted(found, key=lambda incident: incident["number"])

    def wait_for_incident(self, after, timeout):
        deadline = time.time() + timeout
        while time.time() < deadline:
            for incident in self.incidents():
                if incident["time_of_fault_noticed"] >= after:
                    return incident
            if self.status() is not None:
                break
            time.sleep(0.02)
        raise Missed(f"not noticed within {timeout:.0f} s")

    def launch_state(self):
        """Returns the launch's state, and {node: "active", "spare", "lost" or "drained"}."""
        with open(os.path.join(self.dump, "launch.json")) as file:
            state = json.load(file)
        return state["state"], {node["name"]: node["role"] for node in state["nodes"]}

    def checkpoint_steps(self):
        names = os.listdir(self.checkpoints) if os.path.isdir(self.checkpoints) else []
        return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name))

    def victim(self, rank=1):
        """Returns (rank, node, pid) of the rank that is to be hurt."""
        ranks = self.lab.ranks()
        if rank not in ranks:
            raise Missed(f"no rank {rank} is running, only {sorted(ranks)}")
        return (rank, *ranks[rank])

    def step_seconds(self):
        times = [when for when, *_ in self.follower.steps]
        return statistics.median(b - a for a, b in zip(times, times[1:]))

    def check_losses(self, expected):
        made = {}
        for _, attempt, step, *values in self.follower.steps:
            if tuple(values) != expected[step]:
                raise Missed(f"step {step} (attempt {attempt}): loss and norm {values}, undisturbed {expected[step]}")
            made[step] = made.get(step, 0) + 1
        missing = sorted(set(range(1, self.steps + 1)) - set(made))
        if missing or losses(self.dump) != expected:
            raise Missed(f"steps {missing[:5]} are missing" if missing else "metrics.jsonl differs from what was written")


# --- The faults -------------------------------------------------------------------------------------------------------
# Each function returns when the fault struck, in seconds since 1970, and what should be blamed: a rank, a node or both.

def on_rank(signal_number):
    def strike(run):
        rank, node, pid = run.victim()
        return send(pid, signal_number), {"rank": rank, "node": node}
    return strike


def send(pid, signal_number):
    when = time.time()
    os.kill(pid, signal_number)
    return when


def slow_rank(run):
    rank, node, _ = run.victim()
    return run.lab.fault("slow-rank", rank), {"rank": rank, "node": node}


def on_node(kind, *more):
    def strike(run):
        _, node, _ = run.victim()
        return run.lab.fault(kind, node, *more), {"node": node}
    return strike


def launcher_gone(run):
    node = run.lab.run("head", "scontrol", "-o", "show", "job", run.job)
    node = re.search(r"BatchHost=(\S+)", node).group(1)
    return run.lab.fault("power-cut", node), {"node": node}


def bit_flip(run):
    """Flips a bit in a weight of a running rank. A checkpoint shows where the weight is in the rank's memory: for a
    moment after the save, the checkpoint's numbers are the weights."""
    rank, node, pid = run.victim()
    for _ in range(20):
        before, deadline = run.checkpoint_steps(), time.time() + 30
        while run.checkpoint_steps()[-1:] == before[-1:]:
            if time.time() > deadline:
                raise Missed("no checkpoint was saved within 30 s")
            time.sleep(0.001)
        send(pid, signal.SIGSTOP)
        try:
            address = find_in_memory(pid, some_weights(os.path.join(run.checkpoints, f"step-{run.checkpoint_steps()[-1]}")))
            if address is not None:
                # This byte has the upper bits of a float's mantissa: the weight changes by up to 1 %.
                return run.lab.fault("flip", f"/proc/{pid}/mem", address + 2), {"rank": rank, "node": node}
        finally:
            send(pid, signal.SIGCONT)
    raise Missed("the weights were not found in the rank's memory")


def some_weights(checkpoint):
    """Returns 64 bytes from the middle of the largest tensor."""
    with open(sorted(glob.glob(os.path.join(checkpoint, "model*.safetensors")))[0], "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        begin = file.tell()
        tensors = (entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
        first, end = max(tensors, key=lambda offsets: offsets[1] - offsets[0])
        file.seek(begin + (first + end) // 8 * 4)
        return file.read(64)


def find_in_memory(pid, pattern):
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            addresses, permissions, _, _, inode, *_ = line.split()
            if not permissions.startswith("rw") or inode != "0":  # copies in memory are files
                continue
            begin, end = (int(address, 16) for address in addresses.split("-"))
            memory.seek(begin)
            try:
                at = memory.read(end - begin).find(pattern)
            except OSError:  # [vvar] and the like cannot be read
                continue
            if at >= 0:
                return begin + at
    return None


def damaged_checkpoint(run):
    rank, node, pid = run.victim()
    when = send(pid, signal.SIGKILL)
    newest = os.path.join(run.checkpoints, f"step-{run.checkpoint_steps()[-1]}")
    path = sorted(glob.glob(os.path.join(newest, "model*.safetensors")))[-1]
    run.lab.fault("flip", path, os.path.getsize(path) // 2)
    return when, {"rank": rank, "node": node}


def damaged_memory_copy(run):
    """Damages every copy of the newest step: truncates one, and flips a bit in each of the others."""
    rank, node, pid = run.victim()
    # The files are opened before the signal. When the processes have ended, their folders are out of reach.
    files = [open(path, "r+b", buffering=0) for _, other in run.lab.ranks().values()
             for path in glob.glob(f"/proc/{other}/root/dev/shm/tessera-*/memory/**/rank-*", recursive=True)]
    when = send(pid, signal.SIGKILL)
    steps = [re.search(rb'"step":\s*(\d+)', file.read(MEMORY_HEADER)) for file in files]
    newest = max((int(step.group(1)) for step in steps if step), default=None)
    if newest is None:
        raise Missed("there is no copy in memory to damage")
    damaged = [file for file, step in zip(files, steps) if step and int(step.group(1)) == newest]
    for file in damaged:
        middle = (MEMORY_HEADER + file.seek(0, os.SEEK_END)) // 2
        if file is damaged[0]:
            file.truncate(middle)
        else:
            file.seek(middle)
            byte = file.read(1)[0]
            file.seek(middle)
            file.write(bytes([byte ^ 1]))
    for file in files:
        file.close()
    return when, {"rank": rank, "node": node}


def on_disk(kind):
    def strike(run):
        return run.lab.fault(kind), {}
    return strike


def nan(run):  # the keys of the case cause the NaN
    made = run.wait_for(lambda made: made[2] == NAN_STEP - 1, 60, f"step {NAN_STEP - 1}")
    return made[0], {"node": "n2"}


def slow_gemm(run):
    """Slows down all computation on a node, including its active check. Its pauses are no multiple of a monitor's
    beats: a rank that is stopped at eight beats in a row counts as stopped."""
    _, node, _ = run.victim()
    return run.lab.fault("slow-node", node, 0.15, 0.03), {"node": node}


def sick(kind):
    def strike(run):
        _, node, _ = run.victim()
        return kind(run.daemons, node), {"node": node}
    return strike


NAN_STEP = 25
SAVES_OFTEN = {"checkpoint.interval": 5}
LONG_STEPS = 48  # sequences per step. A slowed rank then stands out from ranks that differ because they share two cores


@dataclasses.dataclass
class Case:
    name: str
    strike: Callable
    noticed: float            # bound, in seconds from the fault until the run notices it
    again: float              # bound, in seconds from the fault until a step of a later attempt is made
    noticed_steps: int = 0    # steps that noticing may also take, if they take longer
    lost: int = 1             # bound of lost steps
    at: int = 20              # step after which the fault strikes
    steps: int = 60           # steps of the run
    mesh: str = "shards"
    keys: dict = dataclasses.field(default_factory=dict)
    batch: int = 6            # sequences per step
    engine: Optional[str] = None   # the only engine that the case works with
    again_from_noticed: bool = False
    healed_by: str = "restart"     # or "replay", "going on", "nothing"
    repairs: bool = True           # repairs the node while the healed run goes on
    undrains: bool = False         # an operator returns the node to the healed run
    daemons: bool = False          # health daemons run on all nodes; a blamed node returns after its active check
    finds: Optional[str] = None    # what the active check that the launcher starts on the blamed node finds
    short: bool = False            # `make test` runs the case, too


CASES = [
    Case("kill-rank", on_rank(signal.SIGKILL), 1, 10, short=True),
    Case("stop-rank", on_rank(signal.SIGSTOP), 5, 15, noticed_steps=3),
    Case("slow-rank", slow_rank, 0, 20, noticed_steps=20, batch=LONG_STEPS, again_from_noticed=True),
    Case("nan-once", nan, 0, 5, lost=0, healed_by="replay",
         keys={"debug.nan_at_step": NAN_STEP, "debug.nan_count": 1, "debug.nan_on_rank": 1}),
    Case("nan-on-a-node", nan, 5, 20, steps=200, repairs=False, undrains=True,
         keys={"debug.nan_at_step": NAN_STEP, "debug.nan_count": 1000, "debug.nan_on_rank": 1, "debug.nan_on_host": "n2"}),
    Case("bit-flip", bit_flip, 0, 15, noticed_steps=5, lost=5, mesh="replicas",
         keys={**SAVES_OFTEN, "checkpoint.verify_interval": 5}),
    Case("damaged-checkpoint", damaged_checkpoint, 1, 10, at=23, lost=10, keys={**SAVES_OFTEN, "checkpoint.memory_interval": 0}),
    Case("damaged-memory-copy", damaged_memory_copy, 1, 10, at=23, lost=10, keys={"checkpoint.memory_interval": 5}),
    Case("disk-full", on_disk("disk-full"), 0, 5, healed_by="going on", keys={**SAVES_OFTEN, "checkpoint.async_mode": "async"}),
    Case("disk-hung", on_disk("disk-hung"), 0, 5, healed_by="going on", keys={**SAVES_OFTEN, "checkpoint.async_mode": "async"}),
    Case("link-down", on_node("link-down"), 5, 20),
    Case("one-way-loss", on_node("one-way-loss"), 5, 20),
    Case("one-way-loss-out", on_node("one-way-loss", "out"), 5, 20),
    Case("node-crash", on_node("crash"), 3, 20),
    Case("node-power-cut", on_node("power-cut"), 5, 20, short=True),
    Case("node-frozen", on_node("freeze"), 10, 20),
    Case("gpu-xid", sick(sickness.xid), 3, 10, steps=400, daemons=True, short=True),
    Case("nvlink-down", sick(sickness.nvlink_down), 3, 10, steps=400, daemons=True),
    Case("port-down", sick(sickness.port_down), 3, 10, steps=400, daemons=True),
    Case("dying-link", sick(sickness.dying_link), 3, 10, steps=600, daemons=True),
    Case("dying-disk", sick(sickness.dying_disk), 3, 10, steps=600, daemons=True),
    Case("heat", sick(sickness.heat), 0, 5, steps=200, healed_by="nothing", daemons=True),
    Case("slow-gemm", slow_gemm, 0, 20, noticed_steps=20, steps=200, batch=LONG_STEPS, again_from_noticed=True,
         daemons=True, finds="gemmSlow"),
    Case("launcher-gone", launcher_gone, 15, 45, engine="slurm", repairs=False),
]


# --- One case ---------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Row:
    name: str
    noticed: Optional[float] = None
    noticed_bound: float = 0
    again: Optional[float] = None
    again_bound: float = 0
    lost: Optional[int] = None
    lost_bound: int = 0
    blamed: str = "-"
    action: str = "-"
    missed: list = dataclasses.field(default_factory=list)

    def cells(self):
        def number(value, bound, digits=1):
            return "-" if value is None else f"{value:.{digits}f} / {bound:.{digits}f}"
        return [self.name, number(self.noticed, self.noticed_bound), number(self.again, self.again_bound),
                number(self.lost, self.lost_bound, 0), self.blamed, self.action, "; ".join(self.missed) or "healed"]


HEAD = ["fault", "noticed s / bound", "trains again s / bound", "steps lost / bound", "blamed", "action", "result"]


def print_table(head, rows):
    print("\n" + "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in [head, ["---"] * len(head), *rows]) + "\n")


def check_places(run, row, before, blamed):
    """Checks that no rank has moved to another node but those that were blamed. The launcher names nodes by their ranks.
    Does nothing once the run has ended."""
    def are_running():
        nonlocal now
        now = places(run)
        return len(now) == len(before) or run.status() is not None

    now = {}
    if not wait_for(are_running, 10):
        row.missed.append(f"only ranks {sorted(now)} are running")
    for rank, node in now.items():
        if node != before[rank] and rank != blamed.get("rank") and before[rank] != blamed.get("node"):
            row.missed.append(f"rank {rank} moved from {before[rank]} to {node}")


def places(run):
    """Returns the node of each running rank."""
    return {rank: node for rank, (node, _) in run.lab.ranks().items()}


def who_is_blamed(run, incident, limit):
    """Returns whom the incident blames. Where replicas differ, only the replay tells whose state was wrong. The
    incident's file says so after the replay."""
    end = time.time() + limit
    while time.time() < end:
        named = next((i["blamed"] for i in run.incidents() if i["number"] == incident["number"]), {})
        if named.get("node") is not None or run.status() is not None:
            break
        time.sleep(0.05)
    return named


def follow_restart(run, row, case, when, blamed):
    """Fills in how the run noticed a fault and how it restarted."""
    limit = max(row.again_bound * 3, 60)  # late events are still measured
    attempt = max((a for t, a, *_ in run.follower.steps if t <= when), default=0)
    incident = run.wait_for_incident(when - 0.05, limit)
    noticed = incident["time_of_fault_noticed"]
    row.noticed = max(0.0, noticed - when)
    if case.noticed_steps:
        normal = run.step_seconds()
        # The bound is a number of steps. It also holds if the steps since the fault took longer, but were no more than
        # that.
        made = sum(when < t <= noticed for t, *_ in run.follower.steps)
        row.noticed_bound = max(row.noticed_bound, case.noticed_steps * normal)
        if row.noticed > row.noticed_bound and made <= case.noticed_steps:
            row.noticed_bound = row.noticed
    again = run.wait_for(lambda step: step[1] > attempt and step[0] > when, limit, "step of a later attempt")
    row.again = again[0] - (noticed if case.again_from_noticed else when)
    row.lost = len({step for _, made_by, step, *_ in run.follower.steps if made_by <= attempt and step >= again[2]})
    named = who_is_blamed(run, incident, limit)
    row.blamed = f"rank {named['rank']} on {named['node']}" if named.get("rank") is not None else str(named.get("node"))
    row.action = str(incident.get("action", "-"))
    for what, value in blamed.items():
        if named.get(what) != value:
            row.missed.append(f"blames {row.blamed}, expected {what} {value}")


def undrain(run, node):
    """Returns a drained node to the run, and waits until it is a spare."""
    run.lab.run("head", run.lab.tessera, "undrain", run.dump, node)
    wait_until_spare(run, node)
    if run.engine == "slurm" and not wait_for(lambda: not run.lab.is_drained(node), 15):
        raise Missed(f"Slurm still has {node} drained")


def wait_until_spare(run, node):
    deadline = time.time() + 10
    while True:
        role = run.launch_state()[1][node]
        if role == "spare":
            return
        if time.time() > deadline or run.status() is not None:
            raise Missed(f"{node} was returned and is {role}, not a spare")
        time.sleep(0.1)


def follow_finding(run, row, node, signal_name):
    """Checks that the active check that the launcher has started on the node finds what is wrong."""
    if not wait_for(lambda: run.daemons.verdict(node).startswith(f"[node_problem] {signal_name}:"), 30):
        row.missed.append(f"the verdict on {node} is '{run.daemons.verdict(node)}', not {signal_name}")


def follow_active_check(run, row, node):
    """Checks that the node is drained until its active check has passed, and is a spare then."""
    slurm = run.engine == "slurm"
    if slurm and not wait_for(lambda: run.lab.is_drained(node), 15):
        row.missed.append(f"Slurm has not drained {node}")
    run.daemons.check(node)
    wait_until_spare(run, node)
    if slurm and not wait_for(lambda: not run.lab.is_drained(node), 15):
        row.missed.append(f"Slurm still has {node} drained")


def wait_for(condition, seconds):
    deadline = time.time() + seconds
    while not condition():
        if time.time() > deadline:
            return False
        time.sleep(0.2)
    return True


def follow_nothing(run, row, node):
    """Checks that the run goes on as if nothing had happened."""
    time.sleep(4 * sickness.PERIOD)
    row.action = "an alert"
    verdict = run.daemons.verdict(node)
    if verdict != "ok":
        row.missed.append(f"{node} is {verdict}")
    if run.incidents():
        row.missed.append("there is an incident")


def follow_disk(run, row, when):
    """Checks that training goes on while saves fail, and that saves succeed after the repair."""
    begin = run.follower.last_step()
    try:
        run.wait_for(lambda step: step[2] >= begin + 12, 60, f"step {begin + 12} while saves fail")
    finally:
        run.lab.repair("disk")
    times = [t for t, *_ in run.follower.steps if t > when]
    row.again = max(b - a for a, b in zip(times, times[1:]))  # the longest step
    repaired = run.follower.last_step()
    run.wait(120)
    if not [step for step in run.checkpoint_steps() if step > repaired]:
        row.missed.append("no save succeeded after there was room")
    with open(run.log, errors="replace") as log:
        if not re.search(r"(?i)warn.*(checkpoint|save)", log.read()):
            row.missed.append("not warned of")


def follow_replay(run, row, when):
    made = run.wait_for(lambda step: step[2] == NAN_STEP, 60, f"step {NAN_STEP}")
    row.again = made[0] - when
    row.action = "replay"
    if made[1] != 1:
        row.missed.append("the run was restarted")
    with open(run.log, errors="replace") as log:
        if "transient" not in log.read():
            row.missed.append("not warned of")


def try_case(case, engine, tessera, expected, output, slack):
    row = Row(case.name, noticed_bound=case.noticed * slack, again_bound=case.again * slack, lost_bound=case.lost)
    with Lab(tessera) as lab:
        before = {node: lab.leftovers(node) for node in ("head", *lab.NODES)}
        daemons = sickness.Daemons(lab) if case.daemons else None
        if case.finds:
            daemons.measure()
        run = Run(lab, case.engine or engine, case.mesh, case.steps,
                  {"training.global_batch_size": case.batch, **case.keys},
                  ["--health-rates", daemons.rates] if case.finds else [])
        run.daemons = daemons
        try:
            run.wait_for(lambda step: step[2] >= case.at, 120, f"step {case.at}")
            before_fault = places(run)
            when, blamed = case.strike(run)
            if case.healed_by == "restart":
                follow_restart(run, row, case, when, blamed)
                if case.name != "launcher-gone":  # Slurm starts the job again, on other nodes
                    check_places(run, row, before_fault, blamed)
                # The node returns while the healed run goes on, and must not write to it.
                if daemons:
                    if case.finds:
                        follow_finding(run, row, blamed["node"], case.finds)
                        lab.repair(blamed["node"])
                    follow_active_check(run, row, blamed["node"])
                elif case.repairs and "rank" not in blamed:
                    lab.repair(blamed["node"])
                if case.undrains:
                    undrain(run, blamed["node"])
            elif case.healed_by == "replay":
                follow_replay(run, row, when)
            elif case.healed_by == "nothing":
                follow_nothing(run, row, blamed["node"])
            else:
                follow_disk(run, row, when)
            status = run.wait(120)
            if status != 0:
                row.missed.append(f"exit status {status}")
            run.check_losses(expected)
            check_bounds(row)
            if daemons:
                daemons.end()
            check_nothing_left(lab, before, row)
        except (Missed, RuntimeError, OSError) as problem:
            row.missed.append(str(problem).splitlines()[0])
        finally:
            keep(lab, run, os.path.join(output, case.name))
    return row


def check_bounds(row):
    for value, bound, what in ((row.noticed, row.noticed_bound, "noticed late"), (row.again, row.again_bound, "trains late"),
                               (row.lost, row.lost_bound, "lost too many steps")):
        if value is not None and value > bound:
            row.missed.append(what)


def check_nothing_left(lab, before, row):
    deadline = time.time() + 15  # monitors that were cut off give up by themselves
    for node in before:
        if not lab.is_on(node):
            continue
        while left := lab.leftovers(node) - before[node]:
            if time.time() > deadline:
                row.missed.append(f"left on {node}: {', '.join(sorted(left))[:200]}")
                break
            time.sleep(0.5)


def keep(lab, run, folder):
    """Copies the run's logs, metrics and incidents to a folder, where a person can look for causes."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    for path in (run.log, run.watch_log, os.path.join(run.dump, "metrics.jsonl"), *glob.glob(os.path.join(run.dump, "incidents", "*"))):
        if os.path.isfile(path):
            shutil.copy(path, folder)


def undisturbed(tessera, output, mesh, steps, batch):
    """Returns the losses of a run without a fault. It runs on this machine, outside of the lab, where losses are
    the same (cluster_test.py)."""
    folder = os.path.join(output, f"undisturbed-{mesh}-{steps}-{batch}")
    shutil.rmtree(folder, ignore_errors=True)
    dataset = os.path.join(output, "dataset")
    if not os.path.isdir(dataset):
        make_dataset(tessera, dataset)
    keys = {**MESHES[mesh], "training.global_batch_size": batch}
    subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "3", "--mca", "mpi_yield_when_idle", "1",
                    tessera, *train_arguments(dataset, folder, steps, **keys)],
                   check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return losses(folder)


# --- Many faults in one run -------------------------------------------------------------------------------------------

SPACING = 40  # steps from fault to fault, on average


def plan_of(number, seed):
    """Returns [(step, case, rank)]: random faults at random steps. One of them is a NaN that recurs on one node
    only."""
    draw = random.Random(seed)
    left_out = ("nan-once", "nan-on-a-node", "damaged-checkpoint")
    wanted = [case for case in CASES if case.engine is None and not case.daemons and case.name not in left_out]
    plan = [(SPACING * (i + 1) + draw.randrange(-10, 10), draw.choice(wanted), draw.randrange(3)) for i in range(number)]
    # The NaN is the first fault, because n2, the node on which it recurs, trains until then.
    plan[0] = (plan[0][0], next(case for case in CASES if case.name == "nan-on-a-node"), 1)
    return plan


def campaign(number, seed, engine, tessera, output, slack):
    """Injects random faults at random steps of one run. Returns whether the run healed from all of them."""
    plan = plan_of(number, seed)
    steps, nan_at = SPACING * (number + 2), plan[0][0]
    print(f"campaign: {number} faults in {steps} steps, seed {seed}", flush=True)
    expected = undisturbed(tessera, output, "replicas", steps, LONG_STEPS)
    rows = []
    with Lab(tessera) as lab:
        before = {node: lab.leftovers(node) for node in ("head", *lab.NODES)}
        begin = time.time()
        run = Run(lab, engine, "replicas", steps,
                  {**SAVES_OFTEN, "training.global_batch_size": LONG_STEPS,
                   "checkpoint.verify_interval": 5, "debug.nan_at_step": nan_at, "debug.nan_count": 1000,
                   "debug.nan_on_rank": 1, "debug.nan_on_host": "n2"},
                  ("--restarts-per-hour", str(10 * number)))
        end = Row("end")
        try:
            for step, case, rank in plan:
                made = run.wait_for(lambda made, step=step: made[2] >= step - 1, 300, f"step {step - 1}")
                operate(run)
                step_seconds = run.step_seconds()
                run.victim = lambda rank=rank: Run.victim(run, rank)
                row = Row(f"{step}: {case.name}", noticed_bound=case.noticed * slack, again_bound=case.again * slack,
                          lost_bound=max(case.lost, 5))
                rows.append(row)
                when, blamed = (made[0], {"node": "n2"}) if case.strike is nan else case.strike(run)
                if case.healed_by == "restart":
                    follow_restart(run, row, case, when, blamed)
                    lab.repair(blamed["node"])
                else:
                    time.sleep(12 * step_seconds)
                    lab.repair("disk")
                    row.action = case.healed_by
                check_bounds(row)
                print("  ".join(row.cells()), flush=True)
            status = run.wait(300)
            if status != 0:
                end.missed.append(f"exit status {status}")
            run.check_losses(expected)
            check_nothing_left(lab, before, end)
        except (Missed, RuntimeError, OSError) as problem:
            end.missed.append(str(problem).splitlines()[0])
        finally:
            keep(lab, run, os.path.join(output, "campaign"))
        seconds = time.time() - begin
        print_table(HEAD, [row.cells() for row in rows])
        with open(run.log, errors="replace") as log:
            model = re.search(r"model .*", log.read())
        step_seconds = run.step_seconds()
        found = len(run.incidents()) - sum(row.noticed is not None for row in rows)
        # A bit flip makes two incidents: only the repeated step tells whose state was wrong.
        print(f"further incidents: {found}")
        print(f"{model.group(0) if model else 'model unknown'}; a step takes {step_seconds * 1e3:.0f} ms (median)")
        for what in ("noticed", "again"):
            values = [getattr(row, what) for row in rows if getattr(row, what) is not None]
            if values:
                print(f"{what}: median {statistics.median(values):.1f} s, longest {max(values):.1f} s")
        print(f"effective training time: {100 * run.follower.last_step() * step_seconds / seconds:.1f} % of {seconds:.0f} s")
        print(f"{number} faults, seed {seed}: {'; '.join(end.missed) or 'the losses of an undisturbed run, nothing left'}")
    return not end.missed and not any(row.missed for row in rows)


def operate(run):
    """Acts as an operator until the run trains and has a spare: returns drained nodes to the run."""
    deadline = time.time() + 90
    while True:
        state, roles = run.launch_state()
        for node in (node for node, role in roles.items() if role == "drained"):
            undrain(run, node)
        if state == "training" and "spare" in roles.values():
            return
        if time.time() > deadline or run.status() is not None:
            raise Missed(f"the run is {state}, its nodes are {roles}")
        time.sleep(0.1)


def main():
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="faults: " + ", ".join(names))
    parser.add_argument("tessera")
    parser.add_argument("--only", help="faults, with commas between them")
    parser.add_argument("--short", action="store_true", help="those of `make test`")
    parser.add_argument("--engine", choices=("hosts", "slurm"), default="hosts")
    parser.add_argument("--campaign", type=int, metavar="N", help="N random faults in one run, in place of one fault in each")
    parser.add_argument("--seed", type=int, default=1, help="of the campaign")
    parser.add_argument("--slack", type=float, default=1.0, help="factor of all bounds, for a machine that is busy")
    parser.add_argument("--output", default="build/faults", help="folder for logs and incidents")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else [case.name for case in CASES if case.short or not options.short]
    if unknown := set(chosen) - set(names):
        parser.error(f"there is no fault {', '.join(unknown)}; expected some of {', '.join(names)}")
    tessera, output = os.path.abspath(options.tessera), os.path.abspath(options.output)
    try:
        Lab().script("check")
    except Skip as reason:
        print(reason)
        return SKIP
    os.makedirs(output, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `with Lab` still ends the lab
    if options.campaign:
        return 0 if campaign(options.campaign, options.seed, options.engine, tessera, output, options.slack) else 1
    expected, rows = {}, []
    for case in CASES:
        if case.name not in chosen:
            continue
        key = (case.mesh, case.steps, case.batch)
        if key not in expected:
            expected[key] = undisturbed(tessera, output, *key)
        rows.append(try_case(case, options.engine, tessera, expected[key], output, options.slack))
        print("  ".join(rows[-1].cells()), flush=True)
    print_table(HEAD, [row.cells() for row in rows])
    return 1 if any(row.missed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
