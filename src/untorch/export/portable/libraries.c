// Stand-ins for libdl.so.2 (with UNTORCH_libdl_so_2) and libpthread.so.0 of glibc 2.28, for the linker alone.
//
// glibc 2.34 has their functions in libc.so.6. A library that is linked with that asks libc.so.6 for them, and the
// dynamic linker of glibc before 2.30 fails where the file that is asked does not have the name. Linked with these
// first, it asks the files that have them there; newer dynamic linkers look into all.
#if defined(__x86_64__)
#define GLIBC "GLIBC_2.2.5"
#define GLIBC_DLINFO "GLIBC_2.3.3"
#define GLIBC_SETNAME "GLIBC_2.12"
#elif defined(__aarch64__)
#define GLIBC "GLIBC_2.17"
#define GLIBC_DLINFO GLIBC
#define GLIBC_SETNAME GLIBC
#endif

#define FUNCTION(name, version) \
  void untorch_##name(void);    \
  void untorch_##name(void) {}  \
  __asm__(".symver untorch_" #name "," #name "@@" version);

#ifdef UNTORCH_libdl_so_2
FUNCTION(dladdr, GLIBC)
FUNCTION(dlclose, GLIBC)
FUNCTION(dlerror, GLIBC)
FUNCTION(dlinfo, GLIBC_DLINFO)
FUNCTION(dlopen, GLIBC)
FUNCTION(dlsym, GLIBC)
#else
FUNCTION(pthread_create, GLIBC)
FUNCTION(pthread_getspecific, GLIBC)
FUNCTION(pthread_key_create, GLIBC)
FUNCTION(pthread_mutex_trylock, GLIBC)
FUNCTION(pthread_once, GLIBC)
FUNCTION(pthread_rwlock_rdlock, GLIBC)
FUNCTION(pthread_rwlock_tryrdlock, GLIBC)
FUNCTION(pthread_rwlock_trywrlock, GLIBC)
FUNCTION(pthread_rwlock_unlock, GLIBC)
FUNCTION(pthread_rwlock_wrlock, GLIBC)
FUNCTION(pthread_setname_np, GLIBC_SETNAME)
FUNCTION(pthread_setspecific, GLIBC)
FUNCTION(pthread_sigmask, GLIBC)
#endif
