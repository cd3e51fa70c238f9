// Reads documents, which training text consists of, one after the other from files and folders.
//
//   NAME.json, .jsonl, .ndjson   JSON lines: each line an object with a string "text"; a line is a document
//   NAME.dict, NAME.dict.dz      a dictd database with NAME.index beside it: an entry is a document
//   anything else                plain text: the file is a document
//   a folder                     its files and those of its folders, sorted by path; hidden ones and those that
//                                describe the folder (README, LICENSE, dataset_infos.json, ...) are left out
//
// Any of these files may be compressed by gzip and named so (x.txt.gz, x.jsonl.gz). Compression is recognized by
// content. Text is UTF-8. Ill-formed parts become U+FFFD and are counted. A document that is empty or only white space
// is skipped and counted. The beginning of every file is checked before the first file is read. A file that is not text
// causes an Error that says what it is, or is skipped and counted.
//
// A dictd index has lines "headword TAB offset TAB length". The numbers are in base 64: the digits are RFC 4648's
// alphabet, and the most significant digit is first. Headwords that point at the same bytes name the same entry, which
// is read once. Entries are read in the order of the file. Entries named 00-database-... or 00database... describe the
// database and are left out.
//
// Throws Error, with file and line, for an input that does not exist, cannot be read or is of another kind. Also throws
// it for gzip data that is cut short or damaged, a line that is not such an object, and an index that is missing or
// points outside its database.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace tessera::data {

struct SourceStatistics {
  std::uint64_t num_documents = 0;
  std::uint64_t num_text_bytes = 0;
  std::uint64_t num_empty_documents = 0;     // empty, or only white space
  std::string first_empty;                   // place of the first of them
  std::uint64_t num_repaired_documents = 0;  // documents with ill-formed UTF-8
  std::string first_repaired;                // place of the first of them
};

/// Throws Error if `output` is within an input folder: its files would be read as text the next time.
void require_outside(const std::filesystem::path& output, const std::vector<std::filesystem::path>& inputs);

class DocumentReader;

class DocumentSource {
 public:
  /// Lists the files of `inputs`, in the given order, and checks the beginning of each. Throws Error if one does not
  /// hold documents. With `skip_unknown` it leaves such files out. It logs what it leaves out.
  explicit DocumentSource(const std::vector<std::filesystem::path>& inputs, bool skip_unknown = false);
  ~DocumentSource();

  /// Puts the next document into `text` and returns true. Returns false after the last one. A document and a dictd
  /// database are in memory as a whole, but a JSON-lines file is not.
  bool next(std::string& text);

  /// Returns where the latest document is from, for messages: "FILE", "FILE:LINE" or "FILE, entry at byte N".
  const std::string& origin() const { return origin_; }

  /// Returns the size of all files on the disk. A progress bar shows how much of it has been read.
  std::uint64_t num_bytes_total() const { return num_bytes_total_; }
  /// Returns how much of it has been read.
  std::uint64_t num_bytes_done() const;

  const SourceStatistics& statistics() const { return statistics_; }

 private:
  void require_documents(bool skip_unknown);

  std::vector<std::filesystem::path> files_;
  std::size_t next_file_ = 0;
  std::unique_ptr<DocumentReader> reader_;
  std::uint64_t num_bytes_total_ = 0;
  std::uint64_t num_bytes_of_finished_files_ = 0;
  std::string origin_;
  SourceStatistics statistics_;
};

}  // namespace tessera::data
