"""Runs health daemons on the nodes of a lab. Files stand in for GPUs and ports, and faults change these files."""
import os
import subprocess
import time

from lab import HERE

PERIOD = 1.0  # seconds between two probes of a daemon
PORT = "sys/class/infiniband/mlx5_0/ports/1"
DISK_ERRORS = "sys/block/sda/device/ioerr_cnt"
# Healthy GPUs. The later of two lines of a key counts.
GPUS = "count 2\n0 temperature 60\n1 temperature 61\n1 link.0 1\n"


class Daemons:
    """`tessera health serve` on every node. tests/health/nvml_stub.cc stands in for NVML, and a folder stands in
    for /sys."""

    def __init__(self, lab, nodes=None):
        self.lab, self.nodes, self.processes = lab, nodes or lab.NODES, []
        self.nvml = os.path.join(lab.shared, "libnvidia-ml.so.1")
        self.rates = os.path.join(lab.shared, "rates")
        stub = os.path.join(HERE, os.pardir, "health", "nvml_stub.cc")
        subprocess.run(["c++", "-std=c++20", "-O1", "-shared", "-fPIC", "-o", self.nvml, stub], check=True)
        for node in self.nodes:
            os.makedirs(os.path.join(self.root(node), PORT, "counters"))
            self.write(node, f"{PORT}/counters/symbol_error", "0\n")
            for path in ("dev", os.path.dirname(DISK_ERRORS)):
                os.makedirs(os.path.join(self.root(node), path))
            self.write(node, DISK_ERRORS, "0x0\n")
            self.write(node, "dev/kmsg", "")
            self.repair(node)
            with open(os.path.join(lab.shared, f"health-{node}.log"), "w") as log:
                serve = self.tessera(node, "serve", "--period", PERIOD, "--ledger", f"{self.root(node)}/ledger.jsonl")
                self.processes.append(subprocess.Popen(lab.command(node, *serve), stdin=subprocess.DEVNULL, stdout=log,
                                                       stderr=subprocess.STDOUT))

    def root(self, node):
        return os.path.join(self.lab.shared, f"root-{node}")

    def write(self, node, name, text):
        with open(os.path.join(self.root(node), name), "w") as file:
            file.write(text)

    def repair(self, node):
        self.write(node, "gpus", GPUS)
        self.write(node, f"{PORT}/state", "4: ACTIVE\n")
        self.write(node, f"{PORT}/rate", "400 Gb/sec (4X NDR)\n")

    def tessera(self, node, command, *options):
        return ["env", f"TESSERA_NVML_STUB={self.root(node)}/gpus", self.lab.tessera, "health", command,
                "--nvml", self.nvml, "--sysroot", self.root(node), *options]

    def verdict(self, node):
        """Returns ok, suspect, bad or its reason, as the plugin for node-problem-detector prints it."""
        return self.lab.run(node, self.lab.tessera, "health", "act", "--npd", check=False).splitlines()[-1]

    def measure(self):
        """Measures the rates that every node reaches in its active check. All nodes are one machine, on which ranks
        will train during the next check. So every node now checks itself twice at the same time, which is as
        much load."""
        checks = [subprocess.Popen(self.lab.command(node, *self.active_check(node)), stdout=subprocess.DEVNULL)
                  for node in 2 * self.lab.NODES]
        for check in checks:
            check.wait(60)  # a check with less of the cores than others counts as slow, and writes nothing
        if len(os.listdir(self.rates)) < 3:
            raise RuntimeError("too few nodes have passed their active check before anything was hurt")

    def active_check(self, node):
        return self.tessera(node, "check", "--active", "--check-on-cpu", "--rates", self.rates)

    def check(self, node):
        """Repairs the node, and then runs its active check."""
        self.repair(node)
        time.sleep(2 * PERIOD)
        self.lab.run(node, *self.active_check(node))

    def end(self):
        for node in self.nodes:
            if self.lab.is_on(node):
                self.lab.run(node, "pkill", "-TERM", "-f", "health serve", check=False)
        for process in self.processes:
            process.wait(10)


# Each function makes a node sick and returns when the evidence was complete.

def xid(daemons, node):
    when = time.time()
    daemons.write(node, "gpus", GPUS + "1 xid 79\n")
    return when


def nvlink_down(daemons, node):
    when = time.time()
    daemons.write(node, "gpus", GPUS + "1 link.0 0\n")
    return when


def port_down(daemons, node):
    when = time.time()
    daemons.write(node, f"{PORT}/state", "1: DOWN\n")
    return when


def dying_link(daemons, node):
    """Raises the errors of a port, which is suspect. The second signal is that the port trains down to a lower
    rate."""
    errors = 0
    for _ in range(6):
        errors += 50
        daemons.write(node, f"{PORT}/counters/symbol_error", f"{errors}\n")
        time.sleep(PERIOD / 2)
    if daemons.verdict(node) not in ("suspect", "ok"):
        raise RuntimeError(f"errors alone made {node} {daemons.verdict(node)}")
    when = time.time()
    daemons.write(node, f"{PORT}/rate", "100 Gb/sec (4X NDR)\n")
    for _ in range(12):
        errors += 50
        daemons.write(node, f"{PORT}/counters/symbol_error", f"{errors}\n")
        time.sleep(PERIOD / 2)
    return when


def dying_disk(daemons, node):
    """Raises the errors of a disk, which is suspect. The second signal is the kernel's message about the disk."""
    for errors in range(6):
        daemons.write(node, DISK_ERRORS, f"{errors:#x}\n")
        time.sleep(PERIOD / 2)
    time.sleep(2 * PERIOD)
    if daemons.verdict(node) != "suspect":
        raise RuntimeError(f"errors alone made {node} {daemons.verdict(node)}")
    when = time.time()
    with open(os.path.join(daemons.root(node), "dev/kmsg"), "a") as log:
        log.write("3,4,4,-;EXT4-fs error (device sda1): bad block\n")
    return when


def heat(daemons, node):
    when = time.time()
    daemons.write(node, "gpus", GPUS + "0 temperature 95\n0 throttle 64\n")
    return when
