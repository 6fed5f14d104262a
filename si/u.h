#define V 2
