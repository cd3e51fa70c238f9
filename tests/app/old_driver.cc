// A stand-in for CUDA's driver (libcuda.so.1) that is older than the program's CUDA. It has only the two functions
// below.
extern "C" int cuInit(unsigned) { return 0; }

extern "C" int cuDriverGetVersion(int* version) {
  *version = 12040;
  return 0;
}
