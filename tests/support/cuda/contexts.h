// Switching between stacks, without a call: a return on another stack would be mispredicted.

namespace emulated {

struct context {
    void *at, *stack;
};

typedef void body();

#if defined __x86_64__

// Return the context of a function that never returns, on a stack of its own.
inline context start_of(char *stack, int size, body *function)
{
    return {(void *)function, stack + size / 16 * 16 - 8};
}

// Save where this thread is, and go on elsewhere.
[[gnu::always_inline]] inline void switch_context(context &from, context &to)
{
    context *saved = &from, *next = &to;
    asm volatile("leaq 1f(%%rip), %%rax\n movq %%rax, (%0)\n movq %%rsp, 8(%0)\n"
                 "movq 8(%1), %%rsp\n jmpq *(%1)\n 1:"
                 : "+D"(saved), "+S"(next)
                 :
                 : "rax", "rbx", "rcx", "rdx", "rbp", "r8", "r9", "r10", "r11", "r12", "r13", "r14",
                   "r15", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
                   "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "cc", "memory");
}

#elif defined __aarch64__

inline context start_of(char *stack, int size, body *function)
{
    return {(void *)function, stack + size / 16 * 16};
}

[[gnu::always_inline]] inline void switch_context(context &from, context &to)
{
    register context *saved asm("x0") = &from;
    register context *next asm("x1") = &to;
    asm volatile("stp x29, x30, [sp, -16]!\n adr x9, 1f\n mov x10, sp\n stp x9, x10, [%0]\n"
                 "ldp x9, x10, [%1]\n mov sp, x10\n br x9\n 1: ldp x29, x30, [sp], 16"
                 : "+r"(saved), "+r"(next)
                 :
                 : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14",
                   "x15", "x16", "x17", "x18", "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26",
                   "x27", "x28", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10",
                   "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21",
                   "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31", "cc",
                   "memory");
}

#endif

[[noreturn]] inline void jump(context &to)
{
    context here;
    switch_context(here, to);
    __builtin_unreachable();
}

} // namespace emulated
