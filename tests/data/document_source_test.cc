#include "data/document_source.h"

#include <csignal>

#include "base/log.h"
#include "support.h"
#include "system/stop.h"
#include "tests/log_of.h"

namespace tessera::data {
namespace {

using Documents = std::vector<std::string>;

Documents read_all(const std::vector<std::filesystem::path>& inputs) {
  DocumentSource source(inputs);
  Documents documents;
  std::string text;
  while (source.next(text)) documents.push_back(text);
  EXPECT_EQ(source.num_bytes_done(), source.num_bytes_total());
  EXPECT_EQ(source.statistics().num_documents, documents.size());
  return documents;
}

TEST(DocumentSource, PlainFileIsOneDocument) {
  const TemporaryFolder scratch;
  EXPECT_EQ(read_all({write_file(scratch / "a.txt", "one\n\ntwo\n")}), Documents{"one\n\ntwo\n"});
  EXPECT_EQ(read_all({write_file(scratch / "a.txt", "\xEF\xBB\xBFone \xEF\xBB\xBF")}), Documents{"one \xEF\xBB\xBF"});
}

/// A batch of documents may hold thousands of small files.
TEST(DocumentSource, ASmallFileTakesLittleMemory) {
  const TemporaryFolder scratch;
  DocumentSource source({write_file(scratch / "small.txt", std::string(100, 'x'))});
  std::string text;
  ASSERT_TRUE(source.next(text));
  EXPECT_LT(text.capacity(), 1000u);
}

TEST(DocumentSource, FilesThatAreNamedTwiceAreReadTwiceAndTold) {
  const TemporaryFolder scratch;
  const auto a = write_file(scratch / "in/a.txt", "a"), b = write_file(scratch / "in/b.txt", "b");
  Documents read;
  const std::string log = log_of([&] { read = read_all({scratch / "in", scratch / "in/../in/b.txt"}); });
  EXPECT_EQ(read, (Documents{"a", "b", "b"}));
  EXPECT_NE(log.find("1 file is named more than once"), log.npos) << log;
  EXPECT_EQ(log_of([&] { read_all({a, b}); }), "");
}

TEST(DocumentSource, AFileThatIsDeletedWhileItIsReadIsReadToItsEnd) {
  const TemporaryFolder scratch;
  const auto path = write_file(scratch / "a.txt", "a");
  DocumentSource source({path, write_file(scratch / "b.txt", "bc")});
  std::string text;
  ASSERT_TRUE(source.next(text));
  std::filesystem::remove(path);
  ASSERT_TRUE(source.next(text));
  EXPECT_EQ(text, "bc");
  EXPECT_FALSE(source.next(text));
  EXPECT_EQ(source.num_bytes_done(), 3u);
}

TEST(DocumentSource, GzipIsToldByContent) {
  const TemporaryFolder scratch;
  const std::string text(1'000'000, 'x');  // takes several reads
  EXPECT_EQ(read_all({write_file(scratch / "a.txt.gz", gzipped(text)), write_file(scratch / "b.txt", gzipped("b"))}),
            (Documents{text, "b"}));
  EXPECT_EQ(read_all({write_file(scratch / "c.txt.gz", gzipped("one ") + gzipped("two"))}), Documents{"one two"});
  // tar and some tapes fill up a file with zeros. A gzip member may be empty.
  for (const std::size_t zeros : {1, 512, 600'000}) {
    const std::string filled = gzipped("one ") + gzipped("") + gzipped("two") + std::string(zeros, '\0');
    EXPECT_EQ(read_all({write_file(scratch / "d.txt.gz", filled)}), Documents{"one two"}) << zeros;
  }
  EXPECT_EQ(read_all({write_file(scratch / "e.txt", "\x1f")}), Documents{"\x1f"});
}

TEST(DocumentSource, DamagedGzipIsAnError) {
  const TemporaryFolder scratch;
  std::string text;
  for (int i = 0; i < 5000; ++i) text += fmt::format("{} ", i * i);
  const std::string good = gzipped(text);
  for (const std::size_t size : {std::size_t{3}, std::size_t{11}, good.size() / 2, good.size() - 9, good.size() - 1}) {
    const auto path = write_file(scratch / "cut.txt.gz", good.substr(0, size));
    expect_error([&] { read_all({path}); }, {path.string(), "cut short or damaged"});
  }
  std::string flipped = good;
  flipped[good.size() / 2] ^= 0x10;
  const auto path = write_file(scratch / "flipped.txt.gz", flipped);
  expect_error([&] { read_all({path}); }, {path.string(), "cut short or damaged"});
  // The second member begins with a damaged byte. The file ends soon after it, or far behind it.
  for (const std::size_t rest : {std::size_t{0}, std::size_t{2'000'000}}) {
    std::string members = good + good + std::string(rest, '\0');
    members[good.size()] ^= 0x01;
    expect_error([&] { read_all({write_file(scratch / "members.txt.gz", members)}); }, {"members", "damaged"});
  }
  const auto plain = write_file(scratch / "plain.txt.gz", "not gzip");
  expect_error([&] { read_all({plain}); }, {plain.string(), "only its name calls gzip", "fetch it again"});
}

TEST(DocumentSource, FilesThatOnlyTheirNamesCallGzipCanBeLeftOut) {
  const TemporaryFolder scratch;
  write_file(scratch / "in/a.jsonl.gz", "{\"text\": \"a\"}\n");
  write_file(scratch / "in/b.jsonl.gz", "");  // as empty as an empty text
  write_file(scratch / "in/c.txt.gz", "");
  write_file(scratch / "in/d.txt", "d");
  DocumentSource source({scratch / "in"}, /*skip_unknown=*/true);
  std::string text;
  ASSERT_TRUE(source.next(text));
  EXPECT_EQ(text, "d");
  EXPECT_FALSE(source.next(text));
  EXPECT_EQ(source.num_bytes_total(), 1u);
}

TEST(DocumentSource, JsonLines) {
  const TemporaryFolder scratch;
  const std::string lines =
      "{\"text\": \"one\\nline \\u00e9\", \"id\": 7}\r\n\n  \n{\"meta\": {}, \"text\": \"two\"}\n{\"text\": "
      "\"\"}\n"
      "{\"text\": \"last\"}";
  const Documents expected{"one\nline \u00e9", "two", "last"};
  for (const char* name : {"a.jsonl", "a.json", "a.ndjson"}) {
    EXPECT_EQ(read_all({write_file(scratch / name, lines)}), expected) << name;
  }
  EXPECT_EQ(read_all({write_file(scratch / "b.jsonl.gz", gzipped(lines))}), expected);
}

TEST(DocumentSource, AByteOrderMarkBeforeAnEmptyLineIsNoDocument) {
  const TemporaryFolder scratch;
  EXPECT_EQ(read_all({write_file(scratch / "a.jsonl", "\uFEFF\n{\"text\": \"one\"}\n")}), Documents{"one"});
  EXPECT_EQ(read_all({write_file(scratch / "b.jsonl", "\uFEFF")}), Documents{});
}

TEST(DocumentSource, LinesLongerThanTheBuffer) {
  const TemporaryFolder scratch;
  const std::string text(700'000, 'y');
  const std::string line = "{\"text\": \"" + text + "\"}\n";
  EXPECT_EQ(read_all({write_file(scratch / "a.jsonl", line + "{\"text\": \"b\"}\n" + line)}),
            (Documents{text, "b", text}));
}

/// The end of a line may be the first or the last byte of a read.
TEST(DocumentSource, LinesThatEndAtTheBuffersEnd) {
  const TemporaryFolder scratch;
  for (const int before : {-1, 0, 1}) {
    const std::string text((1 << 18) - 12 + before, 'y');  // {"text": ""} takes 12
    EXPECT_EQ(read_all({write_file(scratch / "a.jsonl", "{\"text\": \"" + text + "\"}\n{\"text\": \"b\"}\n")}),
              (Documents{text, "b"}));
  }
}

TEST(DocumentSource, BadJsonLinesNameTheLine) {
  const TemporaryFolder scratch;
  for (const auto& [bad, reason] :
       std::vector<std::pair<std::string, std::string>>{{"{\"text\": \"cut", "jq -c . IN"},
                                                        {"[1, 2]", "got array"},
                                                        {"[1, 2]", "jq -c '.[]'"},
                                                        {"[", "jq -c '.[]'"},
                                                        {"{\"body\": \"x\"}", "without \"text\""},
                                                        {"{\"text\": 5}", "number"},
                                                        {"{\"text\": \"\\ud800\"}", "expected a JSON object"}}) {
    const auto path = write_file(scratch / "bad.jsonl", "{\"text\": \"good\"}\n\n" + bad + "\n");
    expect_error([&] { read_all({path}); }, {path.string() + ":3", reason});
  }
}

TEST(DocumentSource, TheRemedyForABadLineFitsIt) {
  const TemporaryFolder scratch;
  const auto message_of = [&](const std::string& bad) {
    const auto path = write_file(scratch / "bad.jsonl", "{\"text\": \"good\"}\n" + bad);
    return expect_error([&] { read_all({path}); }, {path.string() + ":2"});
  };
  for (const std::string bad : {"{\"text\": \"cut", "{\"text\": \"a\", \"n\": ", "{"}) {
    const std::string message = message_of(bad);
    EXPECT_NE(message.find("cut short: fetch it again"), message.npos) << message;
    EXPECT_EQ(message.find("jq"), message.npos) << message;
    EXPECT_NE(message_of(bad + "\n").find("jq -c . IN"), message.npos);
  }
  for (const std::string bad : {"NaN", "Infinity", "-Infinity"}) {
    const std::string message = message_of("{\"n\": " + bad + ", \"text\": \"a\"}\n");
    EXPECT_NE(message.find("NaN and Infinity are no JSON: write null"), message.npos) << message;
  }
  EXPECT_EQ(message_of("{\"text\": none}\n").find("NaN"), std::string::npos);
  // The library's own message repeats the line.
  EXPECT_LT(message_of("{\"text\": \"" + std::string(3'000'000, 'x')).size(), 1000u);
}

TEST(DocumentSource, FoldersInSortedOrder) {
  const TemporaryFolder scratch;
  write_file(scratch / "in/b.txt", "b");
  write_file(scratch / "in/a/z.txt", "az");
  write_file(scratch / "in/a/y.jsonl", "{\"text\": \"ay\"}\n");
  write_file(scratch / "in/c.txt.gz", gzipped("c"));
  write_file(scratch / "in/.hidden/x.txt", "no");
  write_file(scratch / "in/.hidden.txt", "no");
  EXPECT_EQ(read_all({scratch / "in"}), (Documents{"ay", "az", "b", "c"}));
  EXPECT_EQ(read_all({scratch / "in/c.txt.gz", scratch / "in/a"}), (Documents{"c", "ay", "az"}));
}

TEST(DocumentSource, LinksThatLeadNowhereAreErrors) {
  for (const auto& [target, reason] : {std::pair{"absent", "No such file"}, {"link", "Too many levels"}}) {
    const TemporaryFolder scratch;
    write_file(scratch / "in/a.txt", "a");
    std::filesystem::create_symlink(target, scratch / "in/link");
    expect_error([&] { read_all({scratch / "in"}); }, {(scratch / "in/link").string(), reason});
  }
}

TEST(DocumentSource, LinksToFoldersAreCounted) {
  const TemporaryFolder scratch;
  write_file(scratch / "in/a.txt", "a");
  write_file(scratch / "other/b.txt", "b");
  for (const char* link : {"z", "y"})
    std::filesystem::create_directory_symlink(scratch / "other", scratch / "in" / link);
  std::filesystem::create_symlink(scratch / "other/b.txt", scratch / "in/c.txt");
  const std::string log = log_of([&] {
    EXPECT_EQ(read_all({scratch / "in"}), (Documents{"a", "b"}));
    spdlog::default_logger()->flush();
  });
  EXPECT_NE(log.find("2 in '" + (scratch / "in").string() + "', such as '" + (scratch / "in/y").string()), log.npos)
      << log;
}

TEST(DocumentSource, DocumentsWithoutTextAreLeftOut) {
  const TemporaryFolder scratch;
  const auto lines = write_file(scratch / "c.jsonl", "{\"text\": \" \\n\\t\"}\n{\"text\": \"c\"}\n{\"text\": \"\"}\n");
  DocumentSource source({write_file(scratch / "b.txt", "b"), write_file(scratch / "empty.txt", ""),
                         write_file(scratch / "blank.txt", " \u3000\u00A0\r\n"), lines});
  std::string text;
  ASSERT_TRUE(source.next(text));
  EXPECT_EQ(text, "b");
  ASSERT_TRUE(source.next(text));
  EXPECT_EQ(text, "c");
  EXPECT_FALSE(source.next(text));
  EXPECT_EQ(source.statistics().num_empty_documents, 4u);
  EXPECT_EQ(source.statistics().first_empty, (scratch / "empty.txt").string());
}

TEST(DocumentSource, FilesThatDescribeAFolderAreNoDocuments) {
  const TemporaryFolder scratch;
  for (const char* name : {"README.md", "readme", "README_zh.md", "LICENSE", "LICENSE-MIT", "sub/COPYING.txt",
                           "dataset_infos.json", "sub/state.json", ".gitattributes"}) {
    write_file(scratch / "in" / name, "{}");
  }
  expect_error([&] { read_all({scratch / "in"}); }, {"in", "no files of text"});
  write_file(scratch / "in/readme.jsonl", "{\"text\": \"a\"}");
  write_file(scratch / "in/readmes.txt", "b");
  EXPECT_EQ(read_all({scratch / "in"}), (Documents{"a", "b"}));
  EXPECT_EQ(read_all({scratch / "in/LICENSE"}), Documents{"{}"});  // a file that is named is read
}

TEST(DocumentSource, FilesOfOtherKindsAreRefusedBeforeAnythingIsRead) {
  const TemporaryFolder scratch;
  const auto png = write_file(scratch / "in/b.png", std::string("\x89PNG\r\n\x1A\n\0\0", 10));
  const auto zipped = write_file(scratch / "in/c.txt.gz", gzipped(std::string("PAR1\0", 5)));
  const auto renamed = write_file(scratch / "in/d.txt", "{\"text\": \"d\"}\n");
  const auto config = write_file(scratch / "in/e.json", "{\"layers\": 3}");
  expect_error([&] { DocumentSource({zipped}); }, {zipped.string(), "Parquet", "not read yet", "to_json"});
  expect_error([&] { DocumentSource({renamed}); }, {renamed.string(), "JSON lines", "NAME.jsonl"});
  expect_error([&] { DocumentSource({config}); }, {config.string(), "without \"text\""});
  // The first line is longer than what tells most kinds of files.
  const auto long_line = write_file(scratch / "in/f.json", "{\"layers\": \"" + std::string(700'000, 'x') + "\"}\n");
  expect_error([&] { DocumentSource({long_line}); }, {long_line.string(), "without \"text\""});
  write_file(scratch / "in/g.dict", "the words of a text");
  write_file(scratch / "in/a.txt", "a");
  expect_error([&] { DocumentSource({scratch / "in"}); },
               {png.string(), "a PNG image", "6 of 7 files", "a PNG image: 1", "Parquet: 1",
                "a dictd database without its index: 1", "--skip-unknown"});
  DocumentSource source({scratch / "in"}, /*skip_unknown=*/true);
  std::string text;
  ASSERT_TRUE(source.next(text));
  EXPECT_EQ(text, "a");
  EXPECT_FALSE(source.next(text));
  EXPECT_EQ(source.num_bytes_total(), 1u);
  expect_error([&] { DocumentSource({png}, /*skip_unknown=*/true); }, {png.string(), "no file with text is left"});
}

/// A file with documents is not left out as unknown because its first line is bad.
TEST(DocumentSource, ABadFirstLineIsNoOtherKindOfFile) {
  const TemporaryFolder scratch;
  write_file(scratch / "in/b.txt", "b");
  for (const char* bad : {"{\"text\": null}", "{\"text\": \"a\", \"score\": NaN}", "{\"text\": \"a\", \"n\": 1e999}",
                          "{\"text\": \"a\\ud800b\"}", "{\"text\": \"cut", "{\"version\": 1}", "\n {\"text\": 1}"}) {
    const auto path = write_file(scratch / "in/a.jsonl", std::string(bad) + "\n{\"text\": \"good\"}\n");
    const std::string message = expect_error(
        [&] {
          DocumentSource source({scratch / "in"}, /*skip_unknown=*/true);
          std::string text;
          source.next(text);
        },
        {path.string() + ":"});
    EXPECT_EQ(message.find("jq -c . IN") != message.npos, std::string_view(bad).ends_with("cut")) << message;
  }
}

TEST(DocumentSource, JsonOfOtherFormsIsUnknown) {
  const TemporaryFolder scratch;
  const auto lines = write_file(scratch / "in/a.jsonl", "{\"text\": \"a\"}\n");
  for (const auto& [content, remedy] : std::vector<std::pair<std::string, std::string>>{
           {"[\n{\"text\": \"b\"}]", "jq -c '.[]' IN"},
           {"{\n  \"text\": \"b\"\n}\n", "jq -c . IN > OUT.jsonl` puts each object on one line"},
           {"{\"text\": \"b\",\n \"id\": 3}\n", "jq -c . IN > OUT.jsonl` puts each object on one line"},
           {"\n{\"layers\": 3}\n\n", "without \"text\""},
           {"17\n", "no JSON object"}}) {
    const auto path = write_file(scratch / "in/b.json", content);
    expect_error([&] { DocumentSource({scratch / "in"}); }, {path.string(), remedy});
    DocumentSource source({scratch / "in"}, /*skip_unknown=*/true);
    EXPECT_EQ(source.num_bytes_total(), std::filesystem::file_size(lines)) << content;
  }
}

TEST(DocumentSource, JsonLinesUnderTheNameOfATextAreRefused) {
  const TemporaryFolder scratch;
  const std::string mark = "\xEF\xBB\xBF", line = "{\"text\": \"a\"}\n";
  for (const std::string& content :
       std::vector<std::string>{line, mark + line, "\n" + line, "  \r\n " + line, "{\"id\": 3, \"text\": \"a\"}\n",
                                "{ \"body\" : \"a\"}", "{\"text\": \"" + std::string(100'000, 'x') + "\"}\n"}) {
    const auto path = write_file(scratch / "a.txt", content);
    expect_error([&] { DocumentSource({path}); }, {path.string(), "JSON lines", "NAME.jsonl"});
  }
  for (const char* text : {"{", "{}", "{x}", "{\"quoted\" words}", "{\n  \"key\": 3\n}", "\"text\": 3"}) {
    EXPECT_EQ(read_all({write_file(scratch / "a.txt", text)}), Documents{text});
  }
}

/// A first line that is longer than the part of a file that is examined may take long to read.
TEST(DocumentSource, ASignalStopsTheReadingOfALongLine) {
  const TemporaryFolder scratch;
  const auto path = write_file(scratch / "a.jsonl", "{\"text\": \"" + std::string(1'000'000, 'x'));
  DocumentSource source({path});  // it is cut short, but that is seen only when it is read
  const auto old_handler = std::signal(SIGTERM, SIG_DFL);
  request_stop(SIGTERM);
  std::string text;
  EXPECT_THROW(source.next(text), Stopped);
  detail::stop_signal = 0;
  std::signal(SIGTERM, old_handler);
}

/// A message goes to a terminal, whose settings the bytes of a file must not change.
TEST(DocumentSource, MessagesQuoteTheInput) {
  const TemporaryFolder scratch;
  const auto path = write_file(scratch / "a.jsonl", "{\"text\": \"a\"}\n{\"x\": \"\x1B[31m\"\n");
  const std::string message = expect_error([&] { read_all({path}); }, {path.string() + ":2", "\\x1b[31m"});
  EXPECT_EQ(message.find('\x1B'), message.npos);
}

TEST(DocumentSource, AnInputThatCannotBeExaminedIsNotCalledMissing) {
  const TemporaryFolder scratch;
  std::filesystem::create_symlink("loop", scratch / "loop");
  expect_error([&] { DocumentSource({scratch / "loop"}); }, {"loop", "Too many levels"});
  expect_error([&] { DocumentSource({scratch / "missing"}); }, {"missing", "no such file"});
}

TEST(DocumentSource, IllFormedUtf8IsReplacedAndCounted) {
  const TemporaryFolder scratch;
  const auto lines = write_file(scratch / "b.jsonl",
                                "{\"text\": \"g\u00F6\u00F6d\"}\n{\"text\": \"fa\xE7"
                                "ade\"}\n");
  DocumentSource source({write_file(scratch / "a.txt", "\u00E9drop\x92s"), lines});
  std::string text;
  ASSERT_TRUE(source.next(text));
  EXPECT_EQ(text, "\u00E9drop\uFFFDs");
  ASSERT_TRUE(source.next(text));
  EXPECT_EQ(text, "g\u00F6\u00F6d");
  ASSERT_TRUE(source.next(text));
  EXPECT_EQ(text, "fa\uFFFDade");
  EXPECT_EQ(source.origin(), lines.string() + ":2");
  EXPECT_EQ(source.statistics().num_repaired_documents, 2u);
  EXPECT_EQ(source.statistics().first_repaired, (scratch / "a.txt").string());
}

// "BC" is 66 in the base 64 of the index.
constexpr std::string_view kIndex =
    "00-database-info\tA\tE\n"
    "00-other\tA\tE\n"
    "beta\tI\tBC\n"
    "alias of beta\tI\tBC\tAlias\n"
    "alpha\tE\tE\n";
const std::string kDatabase = "infoalph" + std::string(66, 'b') + "rest";

TEST(DocumentSource, DictdEntriesOnceInFileOrder) {
  const TemporaryFolder scratch;
  const Documents expected{"alph", std::string(66, 'b')};
  write_file(scratch / "d/x.index", kIndex);
  write_file(scratch / "d/x.dict.dz", gzipped(kDatabase));
  EXPECT_EQ(read_all({scratch / "d/x.dict.dz"}), expected);
  EXPECT_EQ(read_all({scratch / "d"}), expected);  // the index is not a document
  EXPECT_EQ(read_all({scratch / "d/x.dict.dz", scratch / "d/x.index"}), expected);
  EXPECT_EQ(read_all({scratch / "d/x.index"}), Documents{std::string(kIndex)});
  write_file(scratch / "e/x.index", kIndex);
  write_file(scratch / "e/x.dict", kDatabase);
  EXPECT_EQ(read_all({scratch / "e/x.dict"}), expected);
}

TEST(DocumentSource, DictdErrors) {
  const TemporaryFolder scratch;
  const auto database = write_file(scratch / "x.dict", kDatabase);
  expect_error([&] { DocumentSource({database}); }, {"x.index", "does not exist"});
  for (const auto& [bad, reason] :
       std::vector<std::pair<std::string, std::string>>{{"only headword", "TAB"},
                                                        {"w\tA!\tB", "base 64, got \"A!\""},
                                                        {"w\t\tB", "base 64, got \"\""},
                                                        {"w\tAAAAAAAAAAAAAAA\tB", "base 64"},
                                                        {"w\tI\tBH", "has only 78 bytes"},
                                                        {"w\t//////////\t//////////", "has only 78 bytes"}}) {
    write_file(scratch / "x.index", "alpha\tE\tE\n" + bad + "\n");
    expect_error([&] { read_all({database}); }, {"x.index:2", reason});
  }
}

TEST(DocumentSource, InputsThatCannotWork) {
  const TemporaryFolder scratch;
  expect_error([&] { DocumentSource({scratch / "none"}); }, {"none", "no such file"});
  std::filesystem::create_directories(scratch / "empty");
  expect_error([&] { DocumentSource({scratch / "empty"}); }, {"empty", "no files of text"});
  expect_error([&] { DocumentSource({}); }, {"no input"});
}

}  // namespace
}  // namespace tessera::data
