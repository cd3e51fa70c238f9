#!/usr/bin/env python3
"""Tests the cluster in a box, and training in it. Usage: cluster_test.py TESSERA [unittest's arguments]"""
import json
import os
import signal
import subprocess
import sys
import time
import unittest

import sickness
from lab import HERE, SKIP, Lab, Skip, losses, train_arguments

TESSERA = None


def namespaces_and_processes(lab):
    """Returns the inodes of the lab's namespaces, and its processes with their start times."""
    firsts = subprocess.run(["pgrep", "-f", f"init {lab.folder} "], stdout=subprocess.PIPE, text=True).stdout.split()
    spaces, processes = set(), set()
    for pid in firsts:
        for kind in ("net", "uts", "ipc", "mnt", "pid", "time"):
            spaces.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
    spaces -= {os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "uts", "ipc", "mnt", "pid", "time")}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/ns/net") in spaces or pid in firsts:
                processes.add((pid, start_time(pid)))
        except OSError:  # the process has ended meanwhile
            pass
    return spaces, processes


def start_time(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[19]


def machine_state(folder):
    """Returns what a lab may leave on the machine: links, mounts, loop devices and control groups."""
    def output(*words):
        return subprocess.run(words, stdout=subprocess.PIPE, text=True).stdout
    cgroups = output("find", "/sys/fs/cgroup", "-maxdepth", "3", "-name", f"tessera{folder.replace('/', '-')}*")
    mounts = [line for line in output("mount").splitlines() if folder in line]
    return output("ip", "-o", "link"), mounts, [l for l in output("losetup", "-a").splitlines() if folder in l], cgroups


class LabTest(unittest.TestCase):
    def setUp(self):
        self.lab = Lab()
        self.addCleanup(self.lab.down)
        self.before = machine_state(self.lab.folder)

    def expect_nothing_left(self, spaces, processes):
        self.assertFalse(os.path.exists(self.lab.folder))
        for _ in range(30):  # the kernel removes a dead namespace's mounts and links a moment later
            left = self.left(spaces, processes)
            if not any(left):
                return
            time.sleep(0.1)
        self.fail(f"processes, namespaces or a state of the machine are left: {left}")

    def left(self, spaces, processes):
        running = [pid for pid, started in processes if os.path.exists(f"/proc/{pid}/stat") and start_time(pid) == started]
        listed = subprocess.run(["lsns", "-n", "-o", "NS"], stdout=subprocess.PIPE, text=True).stdout.split()
        now = machine_state(self.lab.folder)
        return running, [space for space in spaces if space.strip("]").split("[")[1] in listed], now != self.before and now

    def test_down_leaves_nothing(self):
        self.lab.up()
        shared_memory = os.path.join("/dev/shm", os.path.basename(self.lab.folder))
        self.lab.run("n1", "touch", shared_memory)
        self.assertFalse(os.path.exists(shared_memory))  # every machine has its own /dev/shm
        self.lab.fault("freeze", "n2")
        self.lab.fault("disk-hung")
        # The writer waits in the kernel, where no signal reaches it.
        writer = subprocess.Popen(self.lab.command("n1", "touch", os.path.join(self.lab.disk, "x")))
        time.sleep(0.3)
        found = namespaces_and_processes(self.lab)
        self.assertGreater(len(found[1]), 20)
        self.lab.down()
        writer.wait(10)
        self.expect_nothing_left(*found)

    def test_down_after_up_was_killed(self):
        for seconds in (0.05, 0.4, 1.2):
            up = subprocess.Popen([os.path.join(HERE, "lab.sh"), "--lab", self.lab.folder, "up"])
            time.sleep(seconds)
            up.send_signal(signal.SIGKILL)
            up.wait()
            time.sleep(0.1)
            found = namespaces_and_processes(self.lab)
            self.lab.down()
            self.expect_nothing_left(*found)

    def test_two_labs_do_not_meet(self):
        other = Lab()
        self.addCleanup(other.down)
        self.lab.up()
        other.up()
        self.lab.fault("crash", "n1")
        self.assertEqual(other.run("head", "ssh", "n1", "hostname"), "n1\n")
        other.down()
        self.assertEqual(self.lab.run("head", "ssh", "n2", "hostname"), "n2\n")

    def test_faults_and_repairs(self):
        self.lab.up()
        for node, fault in (("n1", "crash"), ("n2", "power-cut"), ("n3", "freeze"), ("n4", "link-down"),
                            ("n1", "one-way-loss"), ("n2", "one-way-loss out")):
            with self.subTest(fault=fault):
                kind, *direction = fault.split()
                self.lab.fault(kind, node, *direction)
                reach = ["ssh", "-o", "ConnectTimeout=1", node, "true"]
                with self.assertRaises(RuntimeError):
                    self.lab.run("head", *reach, timeout=2)
                self.lab.repair(node)
                self.lab.run("head", *reach, timeout=10)
                self.lab.run("head", "srun", "-w", node, "true", timeout=10)
        path = os.path.join(self.lab.disk, "x")
        self.lab.fault("disk-full")
        with self.assertRaisesRegex(RuntimeError, "No space left"):
            self.lab.run("n1", "bash", "-c", f"head -c 1000000 /dev/zero > {path}")
        self.lab.repair("disk")
        self.lab.fault("disk-hung")
        writer = subprocess.Popen(self.lab.command("n1", "bash", "-c", f"echo text > {path}"))
        time.sleep(0.5)
        self.assertIsNone(writer.poll())
        self.lab.repair("disk")
        self.assertEqual(writer.wait(10), 0)
        self.lab.fault("flip", path, 1)
        with open(path) as file:
            self.assertEqual(file.read(), "tdxt\n")  # e is 0x65, d is 0x64
        self.lab.fault("crash", "head")
        self.lab.repair("head")
        self.lab.run("n1", "srun", "-N4", "hostname", timeout=20)


class TrainingTest(unittest.TestCase):
    STEPS = 20

    @classmethod
    def setUpClass(cls):
        cls.lab = Lab(TESSERA)
        cls.lab.up()
        cls.addClassCleanup(cls.lab.down)
        # This run is on the machine itself, outside of the lab.
        cls.one_machine = cls.arguments("one_machine")
        subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "3", TESSERA, *cls.one_machine],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        cls.expected = losses(os.path.join(cls.lab.shared, "one_machine"))

    @classmethod
    def arguments(cls, name):
        return train_arguments(cls.lab.dataset, os.path.join(cls.lab.shared, name), cls.STEPS)

    def expect_the_same(self, name):
        self.assertEqual(sorted(self.expected), list(range(1, self.STEPS + 1)))
        self.assertEqual(losses(os.path.join(self.lab.shared, name)), self.expected)

    def test_srun(self):
        self.lab.run("head", "srun", "--mpi=pmix", "-N3", self.lab.tessera, *self.arguments("srun"))
        self.expect_the_same("srun")

    def test_mpirun_over_ssh_from_the_head(self):
        self.lab.run("head", "mpirun", "-H", "n1,n2,n3", self.lab.tessera, *self.arguments("head"))
        self.expect_the_same("head")

    def test_mpirun_over_ssh_from_a_node(self):
        self.lab.run("n1", "mpirun", "-H", "n2,n3,n4", self.lab.tessera, *self.arguments("node"))
        self.expect_the_same("node")

    def test_mpirun_in_a_batch_job(self):
        script = os.path.join(self.lab.shared, "batch.sh")
        with open(script, "w") as file:
            file.write("#!/bin/bash\nmpirun " + " ".join([self.lab.tessera, *self.arguments("batch")]) + "\n")
        self.lab.run("head", "sbatch", "--wait", "-N3", "-o", os.path.join(self.lab.shared, "batch.log"), script)
        self.expect_the_same("batch")


class ReadinessTest(unittest.TestCase):
    """Tests whether the nodes fit together, and whether the links between them work."""

    @classmethod
    def setUpClass(cls):
        cls.lab = Lab(TESSERA)
        cls.lab.up()
        cls.addClassCleanup(cls.lab.down)

    def links(self):
        """Returns what `health links` reports as bad. Rates of processes that share two cores differ by a factor of
        ten."""
        said = self.lab.run("head", "mpirun", "-H", "n1,n2,n3,n4", self.lab.tessera, "health", "links", "--mebibytes", "1",
                            "--repeats", "3", "--slow", "0.05", check=False)
        self.assertIn("between nodes  6 pairs", said)
        return [line.split(":")[0] for line in said.splitlines() if line.startswith("bad ")]

    def test_the_doctor(self):
        hosts = ("--hosts", "n1,n2,n3,n4")
        said = self.lab.run("head", self.lab.tessera, "doctor", "--cluster", *hosts, "--folder", self.lab.shared)
        self.assertIn("4 of 4 nodes answer", said)
        self.assertRegex(said, "4 ranks on 4 nodes started and met")
        self.assertNotIn("bad ", said)
        said = self.lab.run("head", "salloc", "-N3", "--quiet", self.lab.tessera, "doctor", "--cluster")
        self.assertIn("engine slurm: 3 of 3 nodes answer", said)
        self.assertIn("3 ranks on 3 nodes started and met", said)
        # Each node has its own folder of this name, or none. Later one node is off.
        own = os.path.join("/tmp", "tessera-own")
        for node in ("head", "n1", "n2"):
            self.lab.run(node, "mkdir", "-p", own)
        said = self.lab.run("head", self.lab.tessera, "doctor", "--cluster", "--hosts", "n1,n2,n3", "--folder", own, check=False)
        self.assertIn(f"bad   n1, n2: '{own}' is another folder there", said)
        self.assertIn(f"bad   n3: '{own}' does not exist there", said)
        self.lab.fault("power-cut", "n4")
        said = self.lab.run("head", self.lab.tessera, "doctor", "--cluster", *hosts, "--folder", self.lab.shared, check=False)
        self.lab.repair("n4")
        self.assertIn("3 of 4 nodes answer", said)
        self.assertRegex(said, "bad   n4: it cannot be asked: .*Try: ssh")
        self.assertIn("3 ranks on 3 nodes started", said)

    def test_a_slow_node_is_named(self):
        self.assertEqual(self.links(), [])
        self.lab.fault("slow-link", "n3", 20)
        self.assertEqual(self.links(), ["bad            linkSlow, rank 2 on n3"])
        self.lab.repair("n3")
        self.assertEqual(self.links(), [])


class CloudTest(unittest.TestCase):
    """Tests nodes that exist only while a run needs them."""
    STEPS, NODES = 900, ("c1", "c2", "c3", "c4")

    def setUp(self):
        self.lab = Lab(TESSERA)
        self.lab.up()
        self.addCleanup(self.lab.down)
        self.cloud = subprocess.Popen([os.path.join(HERE, "lab.sh"), "--lab", self.lab.folder, "cloud"])
        self.addCleanup(self.cloud.wait)
        self.addCleanup(self.cloud.kill)
        self.log = os.path.join(self.lab.shared, "run.log")
        self.dump = os.path.join(self.lab.shared, "run")

    def on(self):
        return [node for node in self.NODES if self.lab.is_on(node)]

    def wait_for(self, what, condition, seconds):
        deadline = time.time() + seconds
        while not condition():
            if time.time() > deadline:
                with open(self.log, errors="replace") as log:
                    self.fail(f"not within {seconds} s: {what}; {self.on()} are on; the run's log:\n{log.read()}")
            time.sleep(0.2)

    def roles(self):
        try:
            with open(os.path.join(self.dump, "launch.json")) as file:
                return {node["name"]: node["role"] for node in json.load(file)["nodes"]}
        except FileNotFoundError:
            return {}

    def test_starts_grows_and_vanishes(self):
        keys = {"checkpoint__enable": "true", "checkpoint__interval": 100, "checkpoint__memory_interval": 5}
        alone = train_arguments(self.lab.dataset, os.path.join(self.lab.shared, "alone"), self.STEPS)
        subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "3", TESSERA, *alone], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        expected = losses(os.path.join(self.lab.shared, "alone"))
        self.assertEqual(self.on(), [])
        script = os.path.join(self.lab.shared, "run.sh")
        with open(script, "w") as file:
            file.write("#!/bin/bash\nexec " + " ".join([
                self.lab.tessera, "launch", "--nodes", "3", "--spares", "0", "--ranks-per-node", "1", "--grow", "--",
                *train_arguments(self.lab.dataset, self.dump, self.STEPS, **keys)]) + "\n")
        job = self.lab.run("head", "sbatch", "--parsable", "-p", "cloud", "-N3", "--no-kill", "--overcommit",
                           "-o", self.log, script).strip()
        self.wait_for("a run on three nodes", lambda: list(self.roles().values()) == 3 * ["active"], 90)
        self.assertEqual(len(self.on()), 3)
        sick, other = sorted(self.roles())[1], (set(self.NODES) - set(self.roles())).pop()
        daemons = sickness.Daemons(self.lab, [sick])
        self.addCleanup(daemons.end)
        time.sleep(2 * sickness.PERIOD)
        sickness.xid(daemons, sick)
        # There is no spare, so the launcher asks for a node, and Slurm has the cloud start one.
        self.wait_for("a new node in the place of the sick one",
                      lambda: self.roles().get(other) == "active" and self.roles()[sick] == "drained", 90)
        self.assertTrue(self.lab.is_drained(sick))
        # A machine that compiles beside this makes 10 steps per second.
        self.wait_for("the run's end", lambda: "COMPLETED" in self.lab.run("head", "scontrol", "show", "job", job, check=False), 300)
        self.assertEqual(losses(self.dump), expected)
        self.wait_for("no node, when none is needed", lambda: not self.on(), 60)
        self.assertEqual([node for node in Lab.NODES if not self.lab.is_on(node)], [])  # these are no cloud nodes

    def test_a_node_that_the_cloud_refuses_is_asked_for_again_later(self):
        def submit(nodes):
            return self.lab.run("head", "sbatch", "--parsable", "-p", "cloud", "-N", nodes, "-o", self.log,
                                "--wrap", "hostname").strip()

        def is_done(job):
            return "COMPLETED" in self.lab.run("head", "scontrol", "show", "job", job, check=False)

        refusal = os.path.join(self.lab.folder, "cloud", f"refuse.{self.NODES[0]}")
        open(refusal, "w").close()
        open(self.log, "w").close()
        job = submit(2)
        self.wait_for("the end of a job on other nodes", lambda: is_done(job), 90)
        self.assertNotIn(self.NODES[0], self.on())
        os.remove(refusal)
        job = submit(len(self.NODES))
        self.wait_for("the end of a job on all nodes", lambda: is_done(job), 120)


def main():
    global TESSERA
    TESSERA = os.path.abspath(sys.argv.pop(1))
    try:
        Lab().script("check")
    except Skip as reason:
        print(reason)
        sys.exit(SKIP)
    unittest.main(verbosity=2)


if __name__ == "__main__":
    main()
