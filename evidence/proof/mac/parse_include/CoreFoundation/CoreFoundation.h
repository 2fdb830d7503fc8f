#pragma once
typedef double CFTimeInterval;
