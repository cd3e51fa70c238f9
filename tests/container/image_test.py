#!/usr/bin/env python3
"""Checks that a container image has what the program needs, and nothing that differs from build to build.

    image_test.py TESSERA OUTPUT    builds the image twice, as root; the first one stays in OUTPUT
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))
BUILD = os.path.join(ROOT, "recipes", "container", "build.sh")
TESSERA, OUTPUT = (os.path.abspath(path) for path in sys.argv[1:])
if os.geteuid() != 0:
    print("image_test.py runs programs in the image, which only root can; recipes/container/build.sh alone needs no root",
          file=sys.stderr)
    sys.exit(2)


def run(*words):
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def build(output, *options):
    built = run(BUILD, "--program", TESSERA, "--output", output, *options)
    if built.returncode != 0:
        sys.exit(built.stdout)
    print(built.stdout, end="", flush=True)


def blob(layout, digest):
    with open(os.path.join(layout, "blobs", *digest.split(":"))) as file:
        return json.load(file)


def manifest(layout):
    with open(os.path.join(layout, "index.json")) as file:
        return blob(layout, json.load(file)["manifests"][0]["digest"])


class Image(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.work = tempfile.mkdtemp()
        build(OUTPUT, "--sshd")
        unpacked = run("umoci", "unpack", "--image", f"{OUTPUT}:tessera", os.path.join(cls.work, "bundle"))
        if unpacked.returncode != 0:
            sys.exit(unpacked.stdout)
        cls.root = os.path.join(cls.work, "bundle", "rootfs")
        cls.config = blob(OUTPUT, manifest(OUTPUT)["config"]["digest"])["config"]

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.work)

    def run_inside(self, *words, user="1000:1000"):
        """Runs a command as the image's user, with /proc, /dev and /sys, as container runtimes do."""
        script = ('mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && mount --rbind /sys "$0/sys" && '
                  f'exec chroot --userspec={user} "$0" /usr/bin/env -i HOME=/home/tessera PATH=/usr/bin:/bin:/usr/sbin "$@"')
        return run("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script, self.root,
                   "sh", "-c", 'cd && exec "$@"', "sh", *words)

    def test_the_same_packages_give_the_same_digests(self):
        again = os.path.join(self.work, "again")
        build(again, "--sshd")
        self.assertEqual(manifest(OUTPUT), manifest(again))

    def test_it_starts_tessera_as_a_user_without_rights(self):
        self.assertEqual(self.config["Entrypoint"], ["/usr/bin/tessera"])
        self.assertEqual(self.config["User"], "1000:1000")
        self.assertEqual(self.run_inside("id", "-un").stdout, "tessera\n")

    def test_doctor_is_content(self):
        told = self.run_inside("tessera", "doctor")
        self.assertEqual(told.returncode, 0, told.stdout)
        self.assertRegex(told.stdout, "computes: +on the CPU")

    def test_it_trains(self):
        # The texts of the dataset are the packages' licences.
        script = """set -e
          cat /usr/share/doc/*/copyright > licences.txt
          tessera data tokenizer --input licences.txt --vocab-size 512 --output my.model
          tessera data prepare --input licences.txt --tokenizer my.model --output mine
          tessera train /usr/share/tessera/configs/debugmodel.toml --training.dataset_path=mine --training.steps=2 \\
            --training.local_batch_size=1 --training.seq_len=64 --validation.enable=false --job.dump_folder=run"""
        trained = self.run_inside("sh", "-c", script)
        self.assertEqual(trained.returncode, 0, trained.stdout)
        self.assertRegex(trained.stdout, r"step +2 +loss +\d")

    def test_ranks_start(self):
        started = self.run_inside("mpirun", "-np", "2", "--oversubscribe", "tessera", "--version")
        self.assertEqual(started.returncode, 0, started.stdout)
        self.assertEqual(len(re.findall(r"^0\.\d+\.\d+", started.stdout, re.M)), 2, started.stdout)

    def test_recipes_are_in_it(self):
        told = self.run_inside("/usr/share/tessera/recipes/variant.sh", "16b", "mxfp8", "direct")
        self.assertEqual(told.returncode, 0, told.stdout)
        self.assertIn("/usr/share/tessera/configs/16b-8gpu.toml", told.stdout)

    def test_its_ssh_server_takes_the_shared_key_and_nothing_else(self):
        script = """set -e
          mkdir .ssh; ssh-keygen -q -t rsa -N '' -f .ssh/id_rsa; cp .ssh/id_rsa.pub .ssh/authorized_keys
          /usr/sbin/sshd -D -e -f /etc/tessera/sshd_config & sleep 1
          ssh 127.0.0.1 echo inside
          ssh -o BatchMode=yes -o IdentityFile=/dev/null -o IdentitiesOnly=yes 127.0.0.1 echo intruder || echo refused
          kill $!"""
        told = self.run_inside("sh", "-c", script)
        self.assertEqual(told.returncode, 0, told.stdout)
        self.assertIn("inside\n", told.stdout)
        self.assertIn("refused\n", told.stdout)
        self.assertNotIn("intruder\n", told.stdout.replace("echo intruder", ""))

    def test_what_names_this_machine_is_not_in_it(self):
        for name in ("etc/apt/sources.list", "etc/hostname", "etc/resolv.conf"):
            self.assertFalse(os.path.exists(os.path.join(self.root, name)), name)
        keys = [name for name in os.listdir(os.path.join(self.root, "etc", "ssh")) if name.startswith("ssh_host_")]
        self.assertEqual(keys, [])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
