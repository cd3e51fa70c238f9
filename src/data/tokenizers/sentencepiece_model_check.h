// Checks those parts of a model that the SentencePiece library trusts without checks. The library (0.1.97 to 0.2.0)
// walks a model's tries without bounds and collects results in arrays of fixed size. So a damaged or hostile model
// could make it read outside of its memory, or end the process.
#pragma once

#include <string>
#include <string_view>

namespace tessera::data {

/// Throws Error, which begins with `place`, for a model that must not reach the library:
///  * bytes that are no protobuf message, or a message with groups, which no model has;
///  * a piece that is empty, has a NUL or more than 8000 bytes, or has a score that is not finite;
///  * more than 64 user-defined pieces, each of which begins with the one before;
///  * a table of character rules (precompiled_charsmap) whose double array or texts lead out of it, or in which more
///    than 32 rules match at one position.
/// It does not check what the library itself checks.
void check_sentencepiece_model(std::string_view model, const std::string& place);

}  // namespace tessera::data
