#include "base/version.h"

#include "version_text.h"

namespace tessera {

const char* version() { return TESSERA_VERSION_TEXT; }

}  // namespace tessera
