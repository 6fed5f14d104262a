#include "u.h"
