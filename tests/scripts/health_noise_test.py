#!/usr/bin/env python3
"""The daemon of a healthy node whose sensors are noisy: health_noise_test.py TESSERA NVML_STUB [--seconds 3600] [--period 5]

Every sensor moves below its limit: temperatures, power, error counters, memory, the rate of a port that is not in use.
Meanwhile the world is hostile, too: files vanish while they are read, metrics are scraped every millisecond, and for a
while the verdict cannot be written. The daemon must neither die nor call the node bad, and must say what it cannot do.
"""
import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from free_port import free_port

PORT = "sys/class/infiniband/mlx5_0/ports/1"


class Node:
    """A folder in place of /sys and /proc, and a file with the answers of the library that replaces NVML."""

    def __init__(self, folder, seed):
        self.folder, self.random = folder, random.Random(seed)
        self.begin = time.time()
        self.counters = {}
        self.write("sys/class/net/eth0/device/vendor", "0x15b3\n")
        self.write("sys/class/net/eth0/flags", "0x1003\n")
        self.write("sys/class/net/eth0/operstate", "up\n")
        self.write("sys/class/nvme/nvme0/state", "live\n")
        self.write("proc/mounts", "/dev/sda1 / ext4 rw,relatime 0 0\n")
        self.write(f"{PORT}/state", "4: ACTIVE\n")
        self.write(f"{PORT}/rate", "400 Gb/sec (4X NDR)\n")
        self.write("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n")  # has no cable
        self.write("dev/kmsg", "")
        self.move()

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + "~", "w") as file:
            file.write(text)
        os.replace(path + "~", path)

    def count(self, name, per_minute):
        """Returns a counter that rises by one or two at a time, by `per_minute` on average."""
        minutes = (time.time() - self.begin) / 60
        while self.counters.get(name, 0) + 2 < per_minute * minutes:
            self.counters[name] = self.counters.get(name, 0) + self.random.randint(1, 2)
        return self.counters.get(name, 0)

    def move(self):
        """Changes every sensor once. The fastest counters rise by less than their limits in docs/cluster.md."""
        draw = self.random
        for counter, rate in (("symbol_error", 5), ("port_rcv_errors", 3), ("link_error_recovery", 1)):
            self.write(f"{PORT}/counters/{counter}", f"{self.count(counter, rate)}\n")
        self.write("sys/class/net/eth0/statistics/rx_errors", f"{self.count('rx', 40)}\n")
        self.write("sys/devices/system/edac/mc/mc0/ce_count", f"{self.count('ce', 0.1)}\n")
        self.write("sys/devices/system/edac/mc/mc0/ue_count", "3\n")  # errors from before the daemon
        self.write("sys/block/sda/device/ioerr_cnt", f"{self.count('io', 0.1):#x}\n")
        self.write("proc/meminfo", f"MemTotal: 1000000 kB\nMemAvailable: {draw.randint(30000, 900000)} kB\n")
        self.write("proc/vmstat", "oom_kill 3\n")
        with open(os.path.join(self.folder, "dev/kmsg"), "a") as log:
            log.write(f"6,{draw.randint(1, 9)},1,-;eth0: link becomes ready\n")
        lines = ["count 2"]
        for gpu in (0, 1):
            lines += [f"{gpu} temperature {draw.randint(30, 86)}", f"{gpu} power {draw.randint(70, 700) * 1000}",
                      f"{gpu} throttle {draw.choice((0, 1, 4))}", f"{gpu} ecc 3", f"{gpu} field.230 0"]
            for link in range(18):
                lines += [f"{gpu} link.{link} 1", f"{gpu} field.161.{link} {self.count(f'replay {gpu} {link}', 4)}",
                          f"{gpu} field.163.{link} {self.count(f'crc {gpu} {link}', 2)}"]
        self.write("gpus", "\n".join(lines) + "\n")

    def vanish(self):
        """Removes a part of /sys for a moment, as when a driver is reloaded. Returns the seconds without it."""
        path, begin = os.path.join(self.folder, "sys/class/infiniband/mlx5_0"), time.time()
        os.rename(path, os.path.join(self.folder, "vanished"))
        time.sleep(0.01)
        os.rename(os.path.join(self.folder, "vanished"), path)
        return time.time() - begin


def scrape(address, storm, stop, found):
    """Scrapes every millisecond until the storm's end, then every 5 s as Prometheus would."""
    while not stop.is_set():
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
                found["text"] = answer.read().decode()
            found["scrapes"] = found.get("scrapes", 0) + 1
        except OSError as problem:
            found["problem"] = str(problem)
        stop.wait(0.001 if not storm.is_set() else 5)


def processor_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Interrupted(Exception):
    """This program was stopped for so long that its node was broken indeed: a port was away during a whole period."""


def watch(options):
    """Runs the daemon on a noisy node, and checks its verdicts."""
    with tempfile.TemporaryDirectory() as scratch:
        node = Node(os.path.join(scratch, "root"), options.seed)
        verdicts = os.path.join(scratch, "health")
        address = f"127.0.0.1:{free_port()}"
        log_path = os.path.join(scratch, "log")
        with open(log_path, "w") as log:
            daemon = subprocess.Popen(
                [options.tessera, "health", "serve", "--sysroot", node.folder, "--nvml", options.nvml_stub, "--folder",
                 verdicts, "--period", str(options.period), "--address", address, "--node", "n1"],
                env={**os.environ, "TESSERA_NVML_STUB": os.path.join(node.folder, "gpus")}, stdout=log,
                stderr=subprocess.STDOUT)
        storm_is_over, stop, found = threading.Event(), threading.Event(), {}
        levels, last = {}, 0.0
        verdicts_since = 0  # the port was last away; the second one is of a look that began after that
        try:
            while not os.path.exists(os.path.join(verdicts, "verdict.json")):
                assert daemon.poll() is None, open(log_path).read()
                time.sleep(0.01)
            scraper = threading.Thread(target=scrape, args=(address, storm_is_over, stop, found), daemon=True)
            scraper.start()
            begin, full, writable_since = time.time(), False, None
            while time.time() - begin < options.seconds:
                assert daemon.poll() is None, f"the daemon ended with {daemon.returncode}:\n{open(log_path).read()}"
                node.move()
                # Two looks in succession that do not find the port would be right to call the node bad.
                if verdicts_since >= 2 and node.random.random() < 0.2:
                    if (away := node.vanish()) >= options.period:
                        raise Interrupted(f"a port was away for {away:.2f} s: the daemon may call the node bad")
                    verdicts_since = 0
                share = (time.time() - begin) / options.seconds
                if share > 0.1 and not storm_is_over.is_set():
                    storm_is_over.set()
                    quiet_since, cost = time.time(), processor_seconds(daemon.pid)
                if share > 0.4 and not full:  # a file replaces the folder, so no verdict can be written
                    full = True
                    os.rename(verdicts, verdicts + "~")
                    with open(verdicts, "w"):
                        pass
                if share >= 0.5 and full and os.path.isfile(verdicts):
                    os.remove(verdicts)
                    os.rename(verdicts + "~", verdicts)
                    writable_since = time.time()
                try:
                    with open(os.path.join(verdicts, "verdict.json")) as file:
                        verdict = json.load(file)
                    if verdict["time"] != last:
                        last = verdict["time"]
                        verdicts_since += 1
                        levels[verdict["level"]] = levels.get(verdict["level"], 0) + 1
                        assert verdict["level"] != "bad", verdict
                except (FileNotFoundError, NotADirectoryError):
                    assert full
                time.sleep(min(1.0, options.period / 5))
            seconds, quiet = time.time() - begin, time.time() - quiet_since
            cost = processor_seconds(daemon.pid) - cost
            log = open(log_path).read()
        finally:
            stop.set()
            daemon.terminate()
            status = daemon.wait(20)
        assert status == 0, (status, log)
        assert not os.path.exists(os.path.join(verdicts, "ledger.jsonl")), "the ledger has a fault"
        assert writable_since and last > writable_since, "no verdict after the folder could be written again"
        assert "verdict.json" in log, f"nothing was said of a verdict that cannot be written:\n{log}"
        assert re.search(r"^tessera_node_bad_total(\{.*\})? 0$", found["text"], re.M), found["text"]
        print(f"verdicts in {seconds:.0f} s: {levels}; {found['scrapes']} scrapes; after their storm the daemon took "
              f"{100 * cost / quiet:.2f} % of a core")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tessera")
    parser.add_argument("nvml_stub")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--period", type=float, default=5.0, help="of the daemon")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for _ in range(3):
        try:
            return watch(options)
        except Interrupted as problem:
            print(problem)
    return "this machine is too busy: it stopped this program in each of three trials"


if __name__ == "__main__":
    sys.exit(main())
