// What a program finds of CUDA's driver, libcuda.so.1, where it is older than the program's CUDA; nothing more.
extern "C" int cuInit(unsigned) { return 0; }

extern "C" int cuDriverGetVersion(int* version) {
  *version = 12040;
  return 0;
}
