"""Runs the cluster in a box (lab.sh), and `tessera train` in it, for the tests and for faults.py."""
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
SKIP = 77  # exit status on a machine that cannot have a lab; ctest's SKIP_RETURN_CODE


class Skip(Exception):
    """Raised when this machine lacks what the lab needs."""


class Lab:
    """A cluster with `tessera` and a small dataset on its shared disk. `with Lab() as lab:` starts it and ends it."""

    NODES = ("n1", "n2", "n3", "n4")

    def __init__(self, tessera=None, folder=None):
        # The path is short because it is part of the names of Slurm's sockets, which have 107 characters at most.
        self.folder = folder or tempfile.mkdtemp(prefix="tessera-lab-", dir="/tmp")
        if folder is None:
            os.rmdir(self.folder)
        self.given_tessera = tessera
        self.shared = os.path.join(self.folder, "shared")
        self.disk = os.path.join(self.folder, "disk")
        self.tessera = os.path.join(self.shared, "tessera")
        self.dataset = os.path.join(self.shared, "dataset")

    def __enter__(self):
        self.up()
        return self

    def __exit__(self, *_):
        self.down()

    def script(self, *words, check=True):
        """Runs lab.sh and returns what it printed."""
        done = subprocess.run([os.path.join(HERE, "lab.sh"), "--lab", self.folder, *map(str, words)],
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode == SKIP:
            raise Skip(done.stderr.strip())
        if check and done.returncode != 0:
            raise RuntimeError(f"lab.sh {' '.join(map(str, words))} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def up(self):
        try:
            self.script("up")
            if self.given_tessera:
                shutil.copy2(self.given_tessera, self.tessera)
                make_dataset(self.tessera, self.dataset)
        except Skip:
            raise
        except BaseException:  # a signal, too
            self.down()
            raise

    def is_drained(self, node):
        """Returns whether Slurm has the node drained."""
        return "DRAIN" in re.search(r"State=(\S+)", self.run("head", "scontrol", "-o", "show", "node", node)).group(1)

    def down(self):
        self.script("down")

    def command(self, node, *words):
        """Returns the words of a command that runs `words` on a node."""
        return [os.path.join(HERE, "lab.sh"), "--lab", self.folder, "in", node, *map(str, words)]

    def run(self, node, *words, timeout=60, check=True):
        """Runs a command on a node and returns what it printed."""
        # The time limit is on the node, where it reaches the command itself.
        done = subprocess.run(self.command(node, "timeout", "-k", "1", timeout, *words), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, words))} on {node} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def fault(self, *words):
        """Injects a fault and returns its time, in seconds since 1970."""
        return float(self.script("fault", *words))

    def repair(self, what):
        self.script("repair", what)

    def ranks(self):
        """Returns {rank: (node, pid)} of the running ranks."""
        found = {}
        for line in self.script("ranks").splitlines():
            rank, node, pid = line.split()
            found[int(rank)] = (node, int(pid))
        return found

    def is_on(self, node):
        return f"\n{node} " in "".join("\n" + line for line in self.script("status").splitlines() if line.endswith(" on"))

    def leftovers(self, node):
        """Returns what a run may leave on a node: processes, shared memory, open ports."""
        return set(self.run(node, "bash", "-c", "pgrep -a 'tessera|orted|mpirun'; ls -d /dev/shm/* 2>/dev/null; "
                            "ss -Hltn | sed 's/.* \\(.*:[0-9]*\\) .*/port \\1/'", check=False).splitlines())


def make_dataset(tessera, folder):
    with tempfile.TemporaryDirectory() as scratch:
        text = os.path.join(scratch, "text.jsonl")
        with open(text, "w") as file:
            for i in range(400):
                file.write(json.dumps({"text": f"document {i} says {i * 7919 % 1000} and {i * i}" + " ab" * (i % 40)}) + "\n")
        subprocess.run([tessera, "data", "prepare", "--input", text, "--tokenizer", "bytes", "--output", folder],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def train_arguments(dataset, dump, steps, **keys):
    """Returns `train` and its keys for a model of 1.0M parameters, whose step takes some 50 ms. keys:
    section__key=value."""
    values = {
        "training.dataset_path": dataset, "job.dump_folder": dump, "training.steps": steps,
        "model.args.vocab_size": 258, "model.args.dim": 32, "model.args.n_layers": 2, "model.args.n_heads": 2,
        "training.seq_len": 16, "training.local_batch_size": 1, "training.global_batch_size": 6,
        "training.num_threads": 1, "training.device": "cpu", "metrics.log_freq": 1,
        # MPI's start has hung once, just after Slurm had added a node. The launcher then starts the next attempt.
        "comm.init_timeout_seconds": 60,
    }
    values.update({name.replace("__", "."): value for name, value in keys.items()})
    return ["train"] + [f"--{name}={value}" for name, value in values.items()]


def losses(dump):
    """Returns {step: (loss, grad_norm)} of a run that has ended."""
    found = {}
    with open(os.path.join(dump, "metrics.jsonl")) as file:
        for line in file:
            entry = json.loads(line)
            if entry.get("loss") is not None:
                found[entry["step"]] = (entry["loss"], entry["grad_norm"])
    return found


class Follower(threading.Thread):
    """Reads a run's metrics.jsonl while it is written, and so sees steps that are made twice.

    steps: (time, attempt, step, loss, grad_norm) of each step, in the order in which the run made them. Every attempt
    writes a new file, which begins with the lines that it keeps.
    """

    def __init__(self, dump):
        super().__init__(daemon=True)
        self.path = os.path.join(dump, "metrics.jsonl")
        self.steps = []
        self.attempt = 0
        self._ended = threading.Event()

    def run(self):
        seen, inode, file, rest = set(), None, None, ""
        while not self._ended.wait(0.01):
            try:
                now = os.stat(self.path).st_ino
                if now != inode:
                    file, inode, rest = open(self.path), now, ""
                    self.attempt += 1
            except FileNotFoundError:
                continue
            *lines, rest = (rest + file.read()).split("\n")
            for line in lines:
                if line in seen:  # a line that was kept: lines hold times, so none is written twice
                    continue
                seen.add(line)
                entry = json.loads(line)
                if entry.get("loss") is not None and entry.get("grad_norm") is not None:
                    self.steps.append((time.time(), self.attempt, entry["step"], entry["loss"], entry["grad_norm"]))

    def end(self):
        time.sleep(0.1)  # the last lines arrive
        self._ended.set()
        self.join()

    def last_step(self):
        return max((step for _, _, step, _, _ in self.steps), default=0)

    def wait_for(self, condition, timeout, what):
        """Returns the first step that was made (a tuple) for which condition(step) holds."""
        deadline, i = time.time() + timeout, 0
        while time.time() < deadline:
            while i < len(self.steps):
                if condition(self.steps[i]):
                    return self.steps[i]
                i += 1
            time.sleep(0.01)
        raise TimeoutError(f"no {what} within {timeout:.0f} s; the last step is {self.last_step()}")
