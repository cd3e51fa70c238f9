"""Applies the patches of tests/walks, counts the files that they touch, builds what they change and checks its results.
usage: walks_test.py BUILD [NAME...]
BUILD is the build folder, whose flags and libraries are used. NAME: Pages, Optimizer, Attention or Transport.

Each patch adds one extension to a copy of the sources. docs/architecture.md lists the files that it touches. The
libraries whose sources see a changed header or function are compiled anew. The check beside the patch then runs."""

import concurrent.futures
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
ROW = re.compile(r"^\| [^|]+ \| \[`[\w.]+`\]\(\.\./tests/walks/(\w+)\.patch\) \| ([^|]+) \| (\d+) \| (\d+) \|$",
                 re.MULTILINE)

# Per patch: the sources to compile, by the library whose flags they take; the test whose libraries are linked; those of
# its libraries that are left out; the tests to run. Where a library has a function too, the linker takes the patch's.
# That does where no header changes and the library's other sources do not contain the function by inlining.
CONFIG_WITH_MODEL = ["src/config/config_keys.cc", "src/config/job_config.cc", "src/config/resolve_recipes.cc",
                     "src/config/validate.cc"]  # the others do not know ModelConfig, which the patch changes
WALKS = {
    "optimizer": ({"ops": ["src/ops/optimizer/lion.cc"], "step": ["src/step/*.cc"],
                   "config": ["src/config/config_keys.cc", "src/config/validate.cc"]},
                  "step", ("step", "run", "generate"), "*"),
    "attention": ({"model": ["src/model/*.cc"], "step": ["src/step/*.cc"], "config": CONFIG_WITH_MODEL,
                   "run": ["src/run/state/hf_config.cc"]},
                  "step", ("model", "step", "run", "generate"), "*"),
    "transport": ({"ep": ["src/ep/backends/backend_choices.cc", "src/ep/backends/make_dispatcher.cc"]},
                  "ep", (), "Ring.*:Dispatcher.GivesWhatItPromises:Dispatcher.IsMeasured"),
}


def rows():
    """Returns, per patch, the files that the page lists, their number, and the number before."""
    text = (ROOT / "docs/architecture.md").read_text()
    return {name: (re.findall(r"`([^`]+)`", files), int(now), int(before))
            for name, files, now, before in ROW.findall(text)}


def touched(patch):
    names = re.findall(r"^(?:---|\+\+\+) [ab]/(\S+)$", patch.read_text(), re.MULTILINE)
    return sorted(set(names))


def run(words, cwd, timeout=280):
    """Runs a command. Fails with its output if it fails."""
    done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
    if done.returncode != 0:
        raise AssertionError(f"status {done.returncode}: {shlex.join(map(str, words))[-300:]}\n{done.stdout[-6000:]}")


# --- The build's commands -------------------------------------------------------------------------------------------


def compiler_words(target, copy):
    """Returns a command of the build for a C++ source of a target, with the copy's sources, up to the output's name."""
    commands = json.loads((BUILD / "compile_commands.json").read_text())
    own = [entry for entry in commands
           if f"/{target}.dir/" in entry["command"] and entry["file"].endswith((".cc", ".cxx"))]
    # Some sources have flags of their own. A target's most frequent flags are those of the others.
    texts = [" ".join(shlex.split(entry["command"])[:-4]) for entry in own]
    entry = own[texts.index(max(texts, key=texts.count))]
    words = shlex.split(entry["command"])
    words = words[:words.index("-o")]
    moved = {f"-I{ROOT}": f"-I{copy}", f"-I{ROOT}/src": f"-I{copy}/src"}
    return [moved.get(word, word.replace(f'="{ROOT}/tests"', f'="{copy}/tests"')) for word in words], entry["directory"]


def linker_words(test, objects, program, without):
    """Returns the build's command that links a test, with other objects, and without some of its libraries."""
    cache = (BUILD / "CMakeCache.txt").read_text()
    ninja = re.search(r"^CMAKE_MAKE_PROGRAM:\w+=(.*)$", cache, re.MULTILINE)[1]
    output = f"tests/{test}/test_{test}"
    commands = subprocess.run([ninja, "-C", str(BUILD), "-t", "commands", output], stdout=subprocess.PIPE, text=True,
                              check=True).stdout
    [line] = [line for line in commands.splitlines() if f" -o {output} " in line]
    [words] = [shlex.split(part) for part in line.split(" && ") if f" -o {output} " in part]
    replaced = {f"libtessera_{name}.a" for name in without}
    kept = [word for word in words if not word.endswith(".o") and pathlib.Path(word).name not in replaced]
    at = kept.index("-o")
    return [*kept[:at], "-Wl,-z,muldefs", *objects, "-o", str(program), *kept[at + 2:]]


# --- The walks ------------------------------------------------------------------------------------------------------


class Pages(unittest.TestCase):
    def test_patches_are_those_of_the_page(self):
        self.assertEqual(sorted(rows()), sorted(WALKS))
        self.assertEqual(sorted(rows()), sorted(path.stem for path in (ROOT / "tests/walks").glob("*.patch")))

    def test_patches_touch_the_files_that_the_page_lists(self):
        for name, (files, now, before) in rows().items():
            with self.subTest(name):
                self.assertEqual(touched(ROOT / f"tests/walks/{name}.patch"), sorted(files))
                self.assertEqual(len(files), now)
                self.assertLessEqual(now, before // 2)


class Walk:
    """The tests of one patch."""

    name = ""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.copy = pathlib.Path(folder.name).resolve()
        for name in ("src", "tests", "docs", "lab"):
            shutil.copytree(ROOT / name, self.copy / name, ignore=shutil.ignore_patterns("golden", "*.svg", "*.png"))
        for name in ("README.md", ".clang-format"):
            shutil.copy(ROOT / name, self.copy / name)

    def apply(self):
        # Git applies a patch at another line, but never to other text. It must not find a repository around the copy.
        patch = ROOT / f"tests/walks/{self.name}.patch"
        run(["env", f"GIT_CEILING_DIRECTORIES={self.copy.parent}", "git", "apply", "--whitespace=error-all", str(patch)],
            self.copy)
        return [path for path in touched(patch) if path.endswith((".h", ".cc"))]

    def compile(self, target, sources):
        """Compiles sources as one, as the release builds do. Returns the object."""
        source = self.copy / f"{target}.cc"
        source.write_text("".join(f'#include "{path}"\n' for path in sources))
        words, folder = compiler_words(target, self.copy)
        words.append("-Wno-subobject-linkage")  # treats a source that another one includes as a header
        output = source.with_suffix(".o")
        run([*words, "-o", str(output), "-c", str(source)], folder)
        return output

    def test_keeps_the_rules_of_the_house(self):
        changed = self.apply()
        run([sys.executable, str(self.copy / "tests/scripts/house_test.py")], self.copy)
        if shutil.which("clang-format-14"):
            run(["clang-format-14", "--dry-run", "--Werror", *changed], self.copy)
        lists = "".join(path.read_text() for path in (self.copy / "src").rglob("CMakeLists.txt"))
        for path in changed:
            if path.endswith(".cc"):
                self.assertIn(pathlib.Path(path).name, lists)

    def test_computes_what_it_should(self):
        sources, test, without, tests = WALKS[self.name]
        changed = self.apply()
        groups = {f"tessera_{library}": sorted(path for pattern in patterns for path in self.copy.glob(pattern))
                  for library, patterns in sources.items()}
        compiled = [str(path.relative_to(self.copy)) for paths in groups.values() for path in paths]
        self.assertEqual([path for path in changed if path.endswith(".cc") and path not in compiled], [])
        groups[f"test_{test}"] = [self.copy / f"tests/walks/{self.name}_check.cc"]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(lambda group: str(self.compile(*group)), groups.items()))
        program = self.copy / "check"
        run(linker_words(test, objects, program, without), BUILD)
        run(["env", "OMP_WAIT_POLICY=passive", str(program), "--gtest_brief=1", f"--gtest_filter={tests}"], self.copy)


class Optimizer(Walk, unittest.TestCase):
    name = "optimizer"


class Attention(Walk, unittest.TestCase):
    name = "attention"


class Transport(Walk, unittest.TestCase):
    name = "transport"


if __name__ == "__main__":
    if not re.search(r"^CMAKE_GENERATOR:\w+=Ninja$", (BUILD / "CMakeCache.txt").read_text(), re.MULTILINE):
        print("skipped: the build's commands are known for Ninja only")
        sys.exit(77)
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
