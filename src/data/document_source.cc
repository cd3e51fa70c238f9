#include "data/document_source.h"

#include <fmt/ranges.h>
#include <zlib.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/text.h"
#include "data/file_kind.h"
#include "system/stop.h"

namespace tessera::data {

/// Reads the documents of one file.
class DocumentReader {
 public:
  virtual ~DocumentReader() = default;
  /// Reads the next document. Sets `repaired` if it has repaired the text's UTF-8 itself; otherwise the caller repairs
  /// it. Returns false after the last document.
  virtual bool next(std::string& text, std::string& origin, bool& repaired) = 0;
  virtual std::uint64_t num_bytes_done() const = 0;
};

namespace {

namespace fs = std::filesystem;

constexpr unsigned kReadBytes = 1u << 18;
constexpr const char* kRenamesField = "`jq -c '{text: .content}' IN > OUT.jsonl` renames a field";

/// Reads the bytes of a file, and decompresses them if they are gzip, in one member or several. zlib's own reader of
/// files drops everything after a member that does not begin like a member. In a damaged file that may be most of it.
class ByteStream {
 public:
  explicit ByteStream(const fs::path& path) : path_(path), file_(std::fopen(path.c_str(), "rbe"), &std::fclose) {
    require(file_ != nullptr, "cannot open '{}': {}", path.string(), std::strerror(errno));
    read();
    is_gzip_ = begins_member();
    const std::string extension = path.extension().string();
    is_misnamed_ = !is_gzip_ && stream_.avail_in > 0 && (extension == ".gz" || extension == ".dz");
    constexpr int kGzip = 16;  // added to the window's bits, it selects gzip's header and checksum
    TESSERA_CHECK(!is_gzip_ || ::inflateInit2(&stream_, kGzip + MAX_WBITS) == Z_OK);
  }
  ~ByteStream() {
    if (is_gzip_) ::inflateEnd(&stream_);
  }
  ByteStream(const ByteStream&) = delete;
  ByteStream& operator=(const ByteStream&) = delete;

  /// Appends up to `max_bytes` bytes to `out`. Returns false at the end of the file.
  bool append_to(std::string& out, unsigned max_bytes) {
    const std::size_t old_size = out.size();
    out.resize(old_size + max_bytes);
    const unsigned size = is_gzip_ ? inflate(out.data() + old_size, max_bytes) : copy(out.data() + old_size, max_bytes);
    out.resize(old_size + size);
    return size > 0;
  }

  /// Returns whether the file's name says gzip, but its first bytes are not those of a gzip file.
  bool is_misnamed() const { return is_misnamed_; }

  /// Returns how many bytes of the file on the disk have been consumed.
  std::uint64_t num_bytes_done() const { return num_read_ - stream_.avail_in; }

 private:
  /// Reads more of the file behind the bytes that are left in the buffer. Returns false at the file's end.
  bool read() {
    std::copy_n(stream_.next_in, stream_.avail_in, buffer_.data());  // moves the rest to the front
    stream_.next_in = buffer_.data();
    const std::size_t size =
        std::fread(buffer_.data() + stream_.avail_in, 1, buffer_.size() - stream_.avail_in, file_.get());
    require(std::ferror(file_.get()) == 0, "cannot read '{}': {}", path_.string(), std::strerror(errno));
    stream_.avail_in += static_cast<unsigned>(size);
    num_read_ += size;
    return size > 0;
  }

  bool begins_member() const {
    return stream_.avail_in >= 2 && stream_.next_in[0] == 0x1f && stream_.next_in[1] == 0x8b;
  }

  unsigned copy(char* out, unsigned max_bytes) {
    if (stream_.avail_in == 0) read();
    const unsigned size = std::min(max_bytes, stream_.avail_in);
    std::memcpy(out, stream_.next_in, size);
    stream_.next_in += size;
    stream_.avail_in -= size;
    return size;
  }

  unsigned inflate(char* out, unsigned max_bytes) {
    stream_.next_out = reinterpret_cast<Bytef*>(out);
    stream_.avail_out = max_bytes;
    while (stream_.avail_out > 0) {
      if (between_members_ && !find_member()) break;
      if (stream_.avail_in == 0 && !read()) fail_damaged("the file ends within a gzip member");
      const int code = ::inflate(&stream_, Z_NO_FLUSH);
      if (code == Z_STREAM_END) {
        between_members_ = true;
      } else if (code != Z_OK && code != Z_BUF_ERROR) {
        fail_damaged(stream_.msg != nullptr ? stream_.msg : ::zError(code));
      }
    }
    return max_bytes - stream_.avail_out;
  }

  /// Finds the next member after one has ended. Only zeros, which fill up the file, may be between or after members.
  /// Returns false at the file's end.
  bool find_member() {
    while (stream_.avail_in >= 2 || read() || stream_.avail_in > 0) {
      if (begins_member()) {
        TESSERA_CHECK(::inflateReset(&stream_) == Z_OK);
        between_members_ = false;
        return true;
      }
      if (*stream_.next_in != 0) fail_damaged("after a gzip member, there is neither another one nor zeros");
      ++stream_.next_in;
      --stream_.avail_in;
    }
    return false;
  }

  [[noreturn]] void fail_damaged(const char* reason) const {
    fail("cannot read '{}': gzip data cut short or damaged near byte {} ({})", path_.string(), num_bytes_done(),
         reason);
  }

  fs::path path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  std::vector<Bytef> buffer_ = std::vector<Bytef>(kReadBytes);
  z_stream stream_ = {};  // its input is the unconsumed part of buffer_, also if the file is not gzip
  bool is_gzip_ = false, is_misnamed_ = false, between_members_ = false;
  std::uint64_t num_read_ = 0;
};

class PlainTextReader : public DocumentReader {
 public:
  explicit PlainTextReader(const fs::path& path) : path_(path), stream_(path) {}

  bool next(std::string& text, std::string& origin, bool&) override {
    if (std::exchange(done_, true)) return false;
    origin = path_.string();
    while (stream_.append_to(text, kReadBytes)) throw_if_stopped();
    text.erase(0, text.size() - without_byte_order_mark(text).size());
    text.shrink_to_fit();  // a batch holds many small files, and each was read into kReadBytes
    return true;
  }
  std::uint64_t num_bytes_done() const override { return stream_.num_bytes_done(); }

 private:
  fs::path path_;
  ByteStream stream_;
  bool done_ = false;
};

/// Returns the text after a byte order mark and white space at its begin.
std::string_view skip_blank(std::string_view text) {
  text = without_byte_order_mark(text);
  return text.substr(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
}

/// Returns where a line ceases to be JSON. That is its end if it ends within a value.
std::size_t place_of_problem(const nlohmann::json::exception& error) {
  const auto* of_syntax = dynamic_cast<const nlohmann::json::parse_error*>(&error);  // a number may be too large
  return of_syntax == nullptr || of_syntax->byte == 0 ? 0 : of_syntax->byte - 1;
}

class JsonLinesReader : public DocumentReader {
 public:
  explicit JsonLinesReader(const fs::path& path) : path_(path), stream_(path) {}

  bool next(std::string& text, std::string& origin, bool& repaired) override {
    while (next_line()) {
      if (skip_blank(line_).empty()) continue;
      origin = fmt::format("{}:{}", path_.string(), line_number_);
      // The line is repaired before it is parsed, because the parser rejects ill-formed UTF-8.
      repaired = repair_utf8(line_) != 0;
      parse(text, origin);
      return true;
    }
    return false;
  }
  std::uint64_t num_bytes_done() const override { return stream_.num_bytes_done(); }

 private:
  bool next_line() {
    for (;;) {
      throw_if_stopped();  // a line may be a whole library
      const std::size_t end = buffer_.find('\n', searched_);
      if (end != std::string::npos) {
        line_.assign(buffer_, begin_, end - begin_);
        begin_ = searched_ = end + 1;
        ++line_number_;
        return true;
      }
      buffer_.erase(0, begin_);
      begin_ = 0;
      searched_ = buffer_.size();
      if (stream_.append_to(buffer_, kReadBytes)) continue;
      if (buffer_.empty()) return false;
      line_ = std::move(buffer_);
      ends_file_ = true;
      buffer_.clear();
      searched_ = 0;
      ++line_number_;
      return true;
    }
  }

  void parse(std::string& text, const std::string& origin) {
    nlohmann::json object;
    try {
      object = nlohmann::json::parse(line_);
    } catch (const nlohmann::json::exception& error) {
      fail("{}: expected a JSON object on one line, got {}: {}{}", origin, quote_text(line_),
           printable(json_problem(error)), remedy(error));
    }
    const std::string expected = "expected a JSON object with a string \"text\"";
    require(!object.is_array(), "{}: {} on each line, got array: `jq -c '.[]' IN > OUT.jsonl` takes it apart", origin,
            expected);
    require(object.is_object(), "{}: {}, got {}", origin, expected, object.type_name());
    const auto field = object.find("text");
    require(field != object.end(), "{}: {}, got an object without \"text\": {}: {}", origin, expected,
            quote_text(line_), kRenamesField);
    require(field->is_string(), "{}: {}, got \"text\" that is {}", origin, expected, field->type_name());
    text = std::move(field->get_ref<std::string&>());
  }

  /// Returns what to do about a line that is no JSON, or "".
  const char* remedy(const nlohmann::json::exception& error) const {
    const std::string_view line = skip_blank(line_);
    if (line.starts_with('[')) return ": `jq -c '.[]' IN > OUT.jsonl` takes an array apart";
    const std::size_t place = place_of_problem(error);
    if (line.starts_with('{') && place >= line_.size()) {
      return ends_file_ ? ": the file is cut short: fetch it again"
                        : ": `jq -c . IN > OUT.jsonl` puts each object on one line";
    }
    const std::string_view rest = std::string_view(line_).substr(std::min(place, line_.size()));
    const bool is_no_number = rest.starts_with("NaN") || rest.starts_with("Infinity");
    return is_no_number ? ": NaN and Infinity are no JSON: write null" : "";
  }

  fs::path path_;
  ByteStream stream_;
  std::string buffer_;
  std::size_t begin_ = 0;     // begin of the next line in buffer_
  std::size_t searched_ = 0;  // [begin_, searched_) has no line end
  std::string line_;
  bool ends_file_ = false;  // the line is the last, and has no line end
  std::uint64_t line_number_ = 0;
};

/// Returns the path without .dict or .dict.dz, or "" if it ends in neither.
fs::path dictd_base(const fs::path& path) {
  const std::string name = path.string();
  for (const std::string_view suffix : {".dict", ".dict.dz"}) {
    if (name.size() > suffix.size() && name.ends_with(suffix)) return name.substr(0, name.size() - suffix.size());
  }
  return {};
}

/// Returns where a dictd database has its index.
fs::path dictd_index(const fs::path& path) { return dictd_base(path).string() + ".index"; }

class DictdReader : public DocumentReader {
 public:
  explicit DictdReader(const fs::path& path)
      : path_(path), index_path_(dictd_index(path)), num_bytes_on_disk_(fs::file_size(path)) {
    ByteStream stream(path);
    while (stream.append_to(database_, kReadBytes)) throw_if_stopped();
    read_index();
  }

  bool next(std::string& text, std::string& origin, bool&) override {
    if (next_entry_ == entries_.size()) return false;
    const auto [offset, length] = entries_[next_entry_++];
    origin = fmt::format("{}, entry at byte {}", path_.string(), offset);
    text.assign(database_, offset, length);
    return true;
  }
  std::uint64_t num_bytes_done() const override {
    return num_bytes_on_disk_ * next_entry_ / std::max<std::size_t>(entries_.size(), 1);
  }

 private:
  using Entry = std::pair<std::uint64_t, std::uint64_t>;  // offset, length

  void read_index() {
    const std::string index = read_text_file(index_path_);
    std::vector<Entry> about_database;
    std::uint64_t line_number = 0;
    for (std::size_t begin = 0; begin < index.size();) {
      const std::size_t end = std::min(index.find('\n', begin), index.size());
      const std::string_view line(index.data() + begin, end - begin);
      begin = end + 1;
      ++line_number;
      if (line.empty()) continue;
      const std::size_t tab1 = line.find('\t');
      const std::size_t tab2 = tab1 == std::string_view::npos ? tab1 : line.find('\t', tab1 + 1);
      require(tab2 != std::string_view::npos, "{}:{}: expected 'headword TAB offset TAB length', got {}",
              index_path_.string(), line_number, quote_text(line));
      // A fourth column, if there is one, is the headword in the form that should be shown.
      const std::size_t tab3 = std::min(line.find('\t', tab2 + 1), line.size());
      const Entry entry{number(line.substr(tab1 + 1, tab2 - tab1 - 1), line_number),
                        number(line.substr(tab2 + 1, tab3 - tab2 - 1), line_number)};
      require(entry.first <= database_.size() && entry.second <= database_.size() - entry.first,
              "{}:{}: an entry of {} bytes at byte {}, but '{}' has only {} bytes", index_path_.string(), line_number,
              entry.second, entry.first, path_.string(), database_.size());
      const bool is_about = line.starts_with("00-database") || line.starts_with("00database");
      (is_about ? about_database : entries_).push_back(entry);
    }
    std::sort(entries_.begin(), entries_.end());
    entries_.erase(std::unique(entries_.begin(), entries_.end()), entries_.end());
    // Other headwords may point at the bytes of a 00-database entry.
    std::sort(about_database.begin(), about_database.end());
    std::erase_if(entries_, [&](const Entry& entry) {
      return std::binary_search(about_database.begin(), about_database.end(), entry);
    });
  }

  std::uint64_t number(std::string_view digits, std::uint64_t line_number) const {
    constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    constexpr std::size_t kMaxDigits = 10;  // 60 bits
    std::uint64_t value = 0;
    bool valid = !digits.empty() && digits.size() <= kMaxDigits;
    for (const char digit : digits) {
      const std::size_t at = kDigits.find(digit);
      valid = valid && at != std::string_view::npos;
      value = value * 64 + at;
    }
    require(valid, "{}:{}: expected a number in base 64, got {}", index_path_.string(), line_number,
            quote_text(digits));
    return value;
  }

  fs::path path_;
  fs::path index_path_;
  std::uint64_t num_bytes_on_disk_;
  std::string database_;
  std::vector<Entry> entries_;
  std::size_t next_entry_ = 0;
};

bool is_json_lines(const fs::path& path) {
  const fs::path uncompressed = path.extension() == ".gz" ? path.stem() : path.filename();
  const std::string extension = uncompressed.extension().string();
  return extension == ".json" || extension == ".jsonl" || extension == ".ndjson";
}

std::unique_ptr<DocumentReader> open_reader(const fs::path& path) {
  if (!dictd_base(path).empty()) return std::make_unique<DictdReader>(path);
  if (is_json_lines(path)) return std::make_unique<JsonLinesReader>(path);
  return std::make_unique<PlainTextReader>(path);
}

/// Returns whether a text begins with {"NAME": as JSON lines do.
bool begins_with_json_line(std::string_view text) {
  text = skip_blank(text);
  if (!text.starts_with('{')) return false;
  text = skip_blank(text.substr(1, text.find('\n') - 1));
  if (!text.starts_with('"')) return false;
  const std::size_t end = text.find('"', 1);
  return end != text.npos && skip_blank(text.substr(end + 1)).starts_with(':');
}

/// Returns whether a line that is not blank follows the first such line.
bool has_second_line(std::string_view text) {
  text = skip_blank(text);
  return !skip_blank(text.substr(std::min(text.find('\n'), text.size()))).empty();
}

/// Returns what is wrong with a file that is called JSON lines, by its first bytes, or by all if it is whole. Returns
/// "" if it may hold documents. One bad line does not make a file foreign: whoever leaves foreign files out would lose
/// its other lines.
std::string find_no_documents(std::string_view beginning, bool is_whole) {
  beginning = skip_blank(beginning);
  if (beginning.empty()) return "";
  if (beginning.starts_with('[')) return "it holds an array: `jq -c '.[]' IN > OUT.jsonl` takes it apart";
  if (!beginning.starts_with('{')) return "its first line is no JSON object";
  const std::size_t end = beginning.find('\n');
  if (end == beginning.npos && !is_whole) return "";  // the line goes on
  const std::string_view line = beginning.substr(0, end);
  try {
    const bool is_documents = nlohmann::json::parse(line).contains("text");
    const bool is_alone = is_whole && !has_second_line(beginning);
    return is_documents || !is_alone
               ? ""
               : fmt::format("it is an object without \"text\": {}: {}", quote_text(line), kRenamesField);
  } catch (const nlohmann::json::exception& error) {
    // A line that is cut off in a string is damaged. Objects that take several lines are broken between values.
    const bool in_string = json_problem(error).find("missing closing quote") != std::string_view::npos;
    const bool goes_on = place_of_problem(error) >= line.size() && !in_string && end != beginning.npos;
    return goes_on ? "an object takes several lines: `jq -c . IN > OUT.jsonl` puts each object on one line" : "";
  }
}

/// Returns the kind of a file that holds anything but documents, or nullopt. Throws Error if the file cannot be read.
std::optional<ForeignKind> find_foreign_kind_of(const fs::path& path) {
  std::string beginning;
  bool is_whole = false;
  ByteStream stream(path);
  if (stream.is_misnamed()) {
    return ForeignKind{.name = "a file that only its name calls gzip",
                       .remedy = "rename it if it is not compressed, or fetch it again"};
  }
  const auto read = [&](unsigned num_bytes) {
    throw_if_stopped();
    is_whole = is_whole || !stream.append_to(beginning, num_bytes);
  };
  while (!is_whole && beginning.size() < kKindBytes) read(static_cast<unsigned>(kKindBytes - beginning.size()));
  if (auto kind = find_foreign_kind(beginning)) return kind;
  if (!dictd_base(path).empty()) {
    const fs::path index = dictd_index(path);
    if (fs::exists(index)) return std::nullopt;
    return ForeignKind{.name = "a dictd database without its index",
                       .remedy = fmt::format("'{}' does not exist; a text has another name", index.string())};
  }
  if (!is_json_lines(path)) {
    if (!begins_with_json_line(beginning)) return std::nullopt;
    return ForeignKind{.name = "JSON lines under the name of a text", .remedy = "rename it to NAME.jsonl"};
  }
  // A file is one object if nothing follows its first line, which may be long.
  constexpr std::size_t kMostBytes = 1u << 24;
  while (!is_whole && beginning.size() < kMostBytes && !has_second_line(beginning)) read(kReadBytes);
  const std::string problem = find_no_documents(beginning, is_whole);
  if (problem.empty()) return std::nullopt;
  return ForeignKind{.name = "JSON that is not JSON lines of documents", .remedy = problem};
}

/// Returns whether a file in a folder, by its name, describes the folder, so that it is not a document.
bool describes_folder(const fs::path& path) {
  const std::string name = path.filename().string();
  for (const char* metadata : {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}) {
    if (name == metadata) return true;
  }
  if (is_json_lines(path)) return false;
  std::string word = name.substr(0, name.find_first_of("._-"));
  for (char& c : word) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return word == "README" || word == "LICENSE" || word == "LICENCE" || word == "COPYING";
}

/// Adds the regular files below `folder`, sorted by path, except those that describe it. A link to a file counts as a
/// file. Links to folders are not followed, so there are no cycles; a warning counts them. Throws Error if a link leads
/// nowhere, because its documents would be missing.
void list_folder(const fs::path& folder, std::vector<fs::path>& files) {
  std::vector<fs::path> found, links;
  std::error_code error;
  auto entry = fs::recursive_directory_iterator(folder, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    if (entry->path().filename().string().starts_with('.')) {
      entry.disable_recursion_pending();
    } else {
      std::error_code broken;
      if (entry->is_regular_file(broken)) found.push_back(entry->path());
      if (broken) throw SystemError(fmt::format("read '{}'", entry->path().string()), broken.value());
      if (entry->is_symlink() && entry->is_directory()) links.push_back(entry->path());
    }
  }
  if (error) throw SystemError(fmt::format("read the folder '{}' or one in it", folder.string()), error.value());
  if (!links.empty()) {
    spdlog::warn("links to folders are not followed: {} in '{}', such as '{}'; --input reads the folder that one names",
                 links.size(), folder.string(), std::ranges::min(links).string());
  }
  std::sort(found.begin(), found.end());
  const auto described = std::stable_partition(found.begin(), found.end(), std::not_fn(describes_folder));
  if (described != found.end()) {
    const auto count = found.end() - described;
    spdlog::warn("{}, such as '{}'; --input PATH_OF_THE_FILE reads such a file",
                 count == 1 ? "1 file is left out because its name describes the folder"
                            : fmt::format("{} files are left out because their names describe the folder", count),
                 described->string());
  }
  files.insert(files.end(), found.begin(), described);
}

/// Takes out the indices of the dictd databases that are there: they are read with their databases.
void erase_indices(std::vector<fs::path>& files) {
  std::set<fs::path> indices;
  for (const fs::path& path : files) {
    if (!dictd_base(path).empty()) indices.insert(dictd_index(path));
  }
  std::erase_if(files, [&](const fs::path& path) { return indices.contains(path); });
}

/// Warns of files that are read several times, as those of "texts texts/*".
void warn_of_repeated(const std::vector<fs::path>& files) {
  std::set<fs::path> seen;
  std::vector<fs::path> repeated;
  for (const fs::path& file : files) {
    if (!seen.insert(fs::weakly_canonical(file)).second) repeated.push_back(file);
  }
  if (repeated.empty()) return;
  spdlog::warn("{} named more than once, and read each time, such as '{}'",
               repeated.size() == 1 ? "1 file is" : fmt::format("{} files are", repeated.size()),
               repeated.front().string());
}

}  // namespace

void require_outside(const fs::path& output, const std::vector<fs::path>& inputs) {
  const fs::path folder = fs::weakly_canonical(fs::absolute(output));
  for (const fs::path& input : inputs) {
    std::error_code error;
    if (!fs::is_directory(input, error)) continue;
    require(*folder.lexically_relative(fs::canonical(input)).begin() == "..",
            "output '{}' is within the input folder '{}', whose files are read as text: choose a folder outside of it",
            output.string(), input.string());
  }
}

DocumentSource::DocumentSource(const std::vector<fs::path>& inputs, bool skip_unknown) {
  for (const fs::path& input : inputs) {
    std::error_code error;
    const fs::file_status status = fs::status(input, error);
    if (fs::is_directory(status)) {
      const std::size_t num_before = files_.size();
      list_folder(input, files_);
      require(files_.size() > num_before, "input '{}': the folder has no files of text", input.string());
    } else {
      require(!error || is_missing(error.value()), "input '{}': {}", input.string(), error.message());
      require(fs::exists(status), "input '{}': no such file or folder", input.string());
      require(fs::is_regular_file(status), "input '{}': neither a regular file nor a folder", input.string());
      files_.push_back(input);
    }
  }
  require(!files_.empty(), "no input files given");
  erase_indices(files_);
  warn_of_repeated(files_);
  require_documents(skip_unknown);
  for (const fs::path& file : files_) num_bytes_total_ += fs::file_size(file);
}

void DocumentSource::require_documents(bool skip_unknown) {
  std::vector<fs::path> readable;
  std::map<std::string, std::uint64_t> num_by_kind;
  std::string first;
  for (const fs::path& path : files_) {
    throw_if_stopped();
    const std::optional<ForeignKind> kind = find_foreign_kind_of(path);
    if (!kind) {
      readable.push_back(path);
    } else if (num_by_kind[kind->name]++ == 0 && first.empty()) {
      first = fmt::format("'{}' is {}; expected text in UTF-8, JSON lines or a dictd database, plain or gzipped: {}",
                          path.string(), kind->name, kind->remedy);
    }
  }
  if (num_by_kind.empty()) return;
  const std::size_t num_foreign = files_.size() - readable.size();
  std::vector<std::string> counts;
  for (const auto& [kind, count] : num_by_kind) counts.push_back(fmt::format("{}: {}", kind, count));
  const std::string summary =
      fmt::format("{} of {} files cannot be read ({})", num_foreign, files_.size(), fmt::join(counts, ", "));
  require(skip_unknown, "{}; {}; --skip-unknown leaves such files out", first, summary);
  require(!readable.empty(), "no file with text is left: {}; the first: {}", summary, first);
  spdlog::warn("{} and are left out; the first: {}", summary, first);
  files_ = std::move(readable);
}

DocumentSource::~DocumentSource() = default;

bool DocumentSource::next(std::string& text) {
  for (;;) {
    if (reader_ == nullptr) {
      if (next_file_ == files_.size()) return false;
      reader_ = open_reader(files_[next_file_]);
    }
    text.clear();
    bool repaired = false;
    if (!reader_->next(text, origin_, repaired)) {
      num_bytes_of_finished_files_ += reader_->num_bytes_done();
      reader_.reset();
      ++next_file_;
      continue;
    }
    repaired = repair_utf8(text) != 0 || repaired;
    if (is_blank(text)) {
      if (statistics_.num_empty_documents++ == 0) statistics_.first_empty = origin_;
      continue;
    }
    if (repaired && statistics_.num_repaired_documents++ == 0) statistics_.first_repaired = origin_;
    ++statistics_.num_documents;
    statistics_.num_text_bytes += text.size();
    return true;
  }
}

std::uint64_t DocumentSource::num_bytes_done() const {
  return num_bytes_of_finished_files_ + (reader_ != nullptr ? reader_->num_bytes_done() : 0);
}

}  // namespace tessera::data
