"""Checks the project's own rules: which folder may include which, and limits for what makes code hard to read.
usage: house_test.py [--table [NAME...]]
--table prints the measured numbers instead of testing them, and for each NAME the places that count.

docs/architecture.md has a table of folders, top to bottom. A folder includes only those that its row names, and of its
own subfolders only those to the right. The limits are in LIMITS below; a change may lower one, never raise it."""

import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = (".h", ".cc", ".cu", ".cuh", ".inc")
INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)/` \|.*\|([^|]*)\|([^|]*)\|$", re.MULTILINE)


# --- Folders --------------------------------------------------------------------------------------------------------


def sources():
    return sorted(path for path in (ROOT / "src").rglob("*") if path.suffix in SOURCE)


def folder(path):
    return str(path.parent.relative_to(ROOT / "src"))


def table(text):
    """Returns, per top folder in the order of the rows, the folders that it may include, and its subfolders from the
    top down."""
    names = lambda cell: re.findall(r"`([\w/]+)`", cell)  # noqa: E731
    return {name: (names(allowed), names(parts)) for name, allowed, parts in ROW.findall(text)}


def problems_of_includes(rows, includes):
    """Returns the problems of `includes`, which are pairs of a source and a header, relative to src."""
    order = list(rows)
    problems = [f"docs/architecture.md: `{name}/` may include `{other}`, which has no row below it"
                for name, (allowed, _) in rows.items() for other in allowed
                if other not in rows or order.index(other) <= order.index(name)]
    for source, header in includes:
        a, b = (str(pathlib.PurePath(path).parent) for path in (source, header))
        top, other = a.split("/")[0], b.split("/")[0]
        if top not in rows:
            problems.append(f"src/{source}: docs/architecture.md has no row for `{top}/`")
        elif top != other and other not in rows[top][0]:
            problems.append(f"src/{source}: includes {header}; docs/architecture.md does not allow it for `{top}/`")
        elif top == other and a != b:
            parts = rows[top][1]
            if a not in parts or b not in parts or parts.index(b) <= parts.index(a):
                problems.append(f"src/{source}: includes {header}; `{b}` is not right of `{a}` in `{top}/`'s row")
    return problems


def includes_of(path):
    return [name for name in INCLUDE.findall(path.read_text()) if (ROOT / "src" / name).is_file()]


def all_headers(header):
    """Returns the project's headers that a source reads when it includes this one, without this one."""
    found, left = set(), [header]
    while left:
        for name in includes_of(ROOT / "src" / left.pop()):
            if name not in found:
                found.add(name)
                left.append(name)
    return found


# --- Sizes ----------------------------------------------------------------------------------------------------------


def without_comments(text):
    return re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/',
                  lambda found: '""' if found[0][0] == '"' else "", text, flags=re.DOTALL)


def functions(text):
    """Returns name and lines of every function. clang-format indents functions by 0 or, in a class, by 2."""
    lines = text.splitlines()
    found, at = [], 0
    while at < len(lines):
        begin = re.match(r"^( {0,4})(?!namespace|class|struct|enum|union|extern|#|//|/\*|\}|using|public|private)[\w:~<\[]",
                         lines[at])
        if begin:
            head, last = lines[at], at
            while not re.search(r"[;{}]\s*(//.*)?$", lines[last]) and last + 1 < len(lines) and last - at < 20:
                last += 1
                head += " " + lines[last].strip()
            is_function = re.search(r"\w\s*\(.*\{\s*(//.*)?$", head) and not re.search(r"[=,]\s*\{$|^\s*(if|for|while|switch)\b",
                                                                                   head)
            if is_function:
                end = last + 1
                while end < len(lines) and not re.match(begin[1] + r"\}", lines[end]):
                    end += 1
                name = re.search(r"(?<!\w)(?!__)([\w:~]+(?:<[^()]*>)?)\s*\(", head)
                found.append((name[1] if name else head.strip(), end - at + 1))
                at = last + 1 if begin[1] else end + 1
                continue
        at += 1
    return found


def long_functions():
    return [f"{path.relative_to(ROOT)}: {name}: {lines} lines" for path in sources()
            for name, lines in functions(path.read_text()) if lines > 80]


def body_at(text, at):
    """Returns the text between the brace at `at` and the one that closes it."""
    depth = 0
    for idx in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[idx], 0)
        if depth == 0:
            return text[at + 1:idx]
    return text[at + 1:]


def num_members(body):
    """Returns the number of data members that an object has, without static ones."""
    flat, depth = "", 0
    for char in body:  # The content of braces, brackets and parentheses does not matter.
        if char in "{([":
            depth += 1
            if depth == 1:
                flat += char
        elif char in "})]":
            depth -= 1
            if depth == 0:
                flat += char
        elif depth == 0:
            flat += char
    flat = re.sub(r"(?<=\))([\w\s:,()]*)\{\}(?!;)", r"\1;", flat)  # A function's body ends a statement.
    while "<" in flat and flat != (shorter := re.sub(r"<[^<>;]*>", "", flat)):
        flat = shorter
    count = 0
    for statement in flat.split(";"):
        statement = re.sub(r"\b(public|private|protected):", "", statement).strip()
        if not statement or re.match(r"(using|friend|static|typedef|enum|class|struct|template|TESSERA_|#)", statement):
            continue
        declared = statement.split("=")[0].strip()
        if "(" in declared or not re.search(r"\w[\s&*]+\w+\s*(\[\])?(\{\})?\s*(,|$)", declared):
            continue
        count += statement.count(",") + 1
    return count


def large_classes():
    found = []
    for path in sources():
        text = without_comments(path.read_text())
        for begin in re.finditer(r"\b(?<!enum )class (\w+)[^;{()]*\{", text):
            members = num_members(body_at(text, begin.end() - 1))
            if members > 15:
                found.append(f"{path.relative_to(ROOT)}: {begin[1]}: {members} members")
    return found


def conditions():
    return [f"{path.relative_to(ROOT)}:{number}: {line.strip()}" for path in sources()
            for number, line in enumerate(path.read_text().splitlines(), 1) if re.match(r"\s*#\s*if", line)]


def fullest_folder():
    counts = {}
    for path in sources():
        counts[folder(path)] = counts.get(folder(path), 0) + 1
    name = max(counts, key=counts.get)
    return [f"src/{name}"] * counts[name]


# --- Prose ----------------------------------------------------------------------------------------------------------


def pages():
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("lab/*.md")])


def prose(text):
    """Returns the lines that are neither code nor a row of a table."""
    in_code, kept = False, []
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.startswith("```")
        if not in_code and not line.startswith(("```", "|", "<!--")):
            kept.append((number, line))
    return kept


def long_lines():
    return [f"{path.relative_to(ROOT)}:{number}: {len(line)} characters" for path in pages()
            for number, line in prose(path.read_text()) if len(line) > 120]


def words_per_sentence(text):
    sentences = []
    for block in re.split(r"\n\s*\n|\n(?=[-*#] |\d+\. )", "\n".join(line for _, line in prose(text))):
        if block.startswith("#"):
            continue
        plain = re.sub(r"^([-*]|\d+\.) ", "", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"<[^>]+>", "", block)))
        sentences += [len(words) for words in (part.split() for part in re.split(r"[.!?](?=\s|$)", plain)) if words]
    return sum(sentences) / len(sentences)


# --- Limits ---------------------------------------------------------------------------------------------------------

# Per measure: the largest number that is allowed, and the function that measures it as a list of places or a number.
LIMITS = {
    "functions over 80 lines": (0, long_functions),
    "classes over 15 members": (0, large_classes),
    "files in the fullest folder of src": (25, fullest_folder),
    "#if in sources": (11, conditions),
    "lines over 120 characters in docs": (0, long_lines),
    "words per sentence in README": (18, lambda: words_per_sentence((ROOT / "README.md").read_text())),
    "headers of ours that config/job_config.h reads": (15, lambda: sorted(all_headers("config/job_config.h"))),
}


def number(found):
    return len(found) if isinstance(found, list) else round(found, 1)


class House(unittest.TestCase):
    def test_folders_include_what_their_rows_allow(self):
        rows = table((ROOT / "docs/architecture.md").read_text())
        includes = [(str(path.relative_to(ROOT / "src")), name) for path in sources() for name in includes_of(path)]
        self.assertEqual(problems_of_includes(rows, includes), [])
        self.assertEqual(sorted(rows), sorted({folder(path).split("/")[0] for path in sources()}))

    def test_limits_hold(self):
        for name, (limit, measure) in LIMITS.items():
            with self.subTest(name):
                found = measure()
                self.assertLessEqual(number(found), limit, "\n" + "\n".join(found if isinstance(found, list) else []))


class Measures(unittest.TestCase):
    """Tests the measures themselves, on what they must and must not find."""

    ROWS = "| `app/` | x | `base`, `ops` | `app/a`, `app/b` |\n| `ops/` | x | `base` | |\n| `base/` | x | | |\n"

    def test_includes(self):
        rows = table(self.ROWS)
        self.assertEqual(problems_of_includes(rows, [("app/a/x.cc", "app/b/y.h"), ("app/a/x.cc", "ops/z.h")]), [])
        for source, header in [("base/x.h", "ops/y.h"), ("app/b/x.h", "app/a/y.h"), ("new/x.h", "base/y.h")]:
            self.assertEqual(len(problems_of_includes(rows, [(source, header)])), 1, source)
        upwards = table(self.ROWS.replace("| `base/` | x | |", "| `base/` | x | `ops` |"))
        self.assertEqual(len(problems_of_includes(upwards, [])), 1)

    def test_functions(self):
        text = "int one() {\n" + "  f();\n" * 79 + "}\nclass A {\n  void two() {\n" + "    f();\n" * 80 + "  }\n};\n"
        self.assertEqual(functions(text), [("one", 81), ("two", 82)])
        self.assertEqual(functions("const int kTable[] = {\n" + "  1,\n" * 90 + "};\n"), [])

    def test_members(self):
        body = """ public: explicit A(int x) : a_(x) {} void f() const; static int s; using T = int;
                   std::function<void(int, int)> g_; private: int a_ = 0, b_; std::vector<int> c_{1, 2}; """
        self.assertEqual(num_members(body), 4)

    def test_prose(self):
        text = "# A title\n\nOne two. Three [four](five.md) five!\n\n```\nnot counted. at all.\n```\n- six\n- seven\n"
        self.assertEqual(words_per_sentence(text), 7 / 4)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--table"]:
        for name, (limit, measure) in LIMITS.items():
            found = measure()
            print(f"{name}: {number(found)}, at most {limit}")
            for place in found if isinstance(found, list) and name in sys.argv[2:] else []:
                print(f"    {place}")
    else:
        unittest.main(argv=sys.argv[:1])
